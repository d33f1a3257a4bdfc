"""What the pages show, and that no markup of a visitor is in them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.app import pages as app_pages
from cliquetta.app.session import AppSession
from cliquetta.methods.scap.evidence import describe
from cliquetta.model.block import Prefix
from cliquetta.model.clip import CLIP
from cliquetta.serve.schema import SessionRequest
from cliquetta.serve.settings import Settings
from tests._helpers.serve_setup import picture
from tests._helpers.tolerance import SUM
from tests.app.conftest import FOG, NAMES, Make


@pytest.mark.parametrize("kind", ["class", "rollout"])
def test_attention_is_that_of_the_passes_that_were_scored(make: Make, kind: Any) -> None:
    session = make("scap")
    session.next_of_stream(*FOG)
    shown = session.next_of_stream(*FOG)
    adapter: Any = session.adapter
    tower, (block,) = adapter.visual.tower, adapter.config.blocks
    evidence = shown.prediction.evidence
    width = evidence["passes"].width
    assert evidence["prompt_mask"].any()
    for index in range(len(shown.rows)):
        maps = app_pages.attention_maps(adapter, shown.pixels, shown.prediction, index, kind)
        masks = evidence["prompt_mask"][index * width : (index + 1) * width]
        prompts = evidence["prompts"][index * width : (index + 1) * width]
        passes = [(p, m) for p, m in zip(prompts, masks, strict=True) if m.any()]
        assert len(maps) == 1 + len(passes) and maps[0].to_prompts == maps[0].moved == 0
        image = shown.pixels[index : index + 1]
        for entry, shown_map in zip([None, *passes], maps, strict=True):
            prefix = None
            if entry is not None:
                own = entry[0][entry[1]]  # prompts of this pass alone, nothing masked
                tokens = own.view(-1, *adapter.memory["start_prompt"].shape)[:, 0]
                prefix = {block: Prefix(tokens.reshape(1, -1, *tokens.shape[2:]), None)}
            weights = tower.attention(image, [block], prefix=prefix)[block]
            row = weights.mean(dim=1)[0, 0]
            if kind == "rollout":  # one prompted block, the last: half stays where it was
                row = row / 2
            np.testing.assert_allclose(shown_map.grid.ravel(), row[-16:], atol=SUM)
            assert shown_map.to_prompts == pytest.approx(float(row[:-17].sum()), abs=SUM)


def test_methods_without_evidence_say_so(make: Make) -> None:
    session = make("tent")
    assert app_pages.cliques_page(session) == app_pages.NOTHING_YET
    session.next_of_stream(*FOG)
    assert "forms no cliques" in app_pages.cliques_page(session)
    assert "keeps no cache" in app_pages.memory_page(session)
    assert "plain attention only" in app_pages.attention_page(session, 0, "class")


def test_galleries_show_every_clique_with_class_size_and_loss(make: Make) -> None:
    session = make("scap")
    shown = session.next_of_stream(*FOG)
    page = app_pages.cliques_page(session)
    cliques = describe(shown.prediction)["cliques"]
    assert cliques
    heads = re.findall(r"<b>(\w+)</b> · (\d+) images? · loss ([\d.-]+) → ([\d.-]+)", page)
    for head, clique in zip(heads, cliques, strict=True):
        losses = [f"{clique[when]['total']:.3f}" for when in ("before", "after")]
        assert head == (NAMES[clique["class"]], str(clique["size"]), *losses)
    assert page.count("<img") == sum(c["size"] for c in cliques)


def test_pages_mark_changes_and_hold_no_markup_of_a_visitor(
    tiny_clip: CLIP, tmp_path: Path
) -> None:
    evil = ("<script>a</script>", "'onerror='b", "cat")
    request = SessionRequest(classes=list(evil), method="tent")
    session = AppSession(Settings({"tiny": tiny_clip}), request)
    path = tmp_path / "<b>x.png"
    path.write_bytes(picture(1))
    shown = session.next_of_files([path, tmp_path / "<i>.png"][:1], 4)
    changed = replace(shown.rows[0], before=evil[0], after=evil[1])
    session.last = replace(shown, rows=(changed,))
    page = app_pages.predictions_page(session)
    assert page.count("cq-changed") == 1 and "changed</span>" in page
    assert "cq-changed" not in app_pages._card(replace(changed, after=evil[0]), "", "tent")
    notice = app_pages.notice("<u>", bad=True, items=["<s>"])
    for text in (page, notice, app_pages.attention_page(session, 0, "class")):
        assert not re.search(r"<(script|b>x|u>|s>)", text) and "='b" not in text
