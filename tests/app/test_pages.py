"""Pages of the app: what they show, and no markup of a visitor."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.app import pages as app_pages
from cliquetta.methods.scap.evidence import describe
from cliquetta.model.block import Prefix
from tests._helpers.serve_setup import picture
from tests._helpers.tolerance import SUM
from tests.app.conftest import FOG, NAMES, Make


@pytest.mark.parametrize("kind", ["class", "rollout"])
def test_attention_is_that_of_the_passes_that_were_scored(
    make: Make, kind: Any
) -> None:
    session = make("scap")
    session.next_of_stream(*FOG)
    shown = session.next_of_stream(*FOG)
    adapter: Any = session.adapter
    tower, (block,) = adapter.visual.tower, adapter.config.blocks
    evidence = shown.prediction.evidence
    width = evidence["passes"].width
    assert evidence["prompt_mask"].any()
    for index in range(len(shown.rows)):
        mapped = app_pages.attention_maps(
            adapter, shown.pixels, shown.prediction, index, kind
        )
        assert mapped is not None
        titles, maps = mapped
        masks = evidence["prompt_mask"][index * width : (index + 1) * width]
        prompts = evidence["prompts"][index * width : (index + 1) * width]
        passes = [(p, m) for p, m in zip(prompts, masks, strict=True) if m.any()]
        assert len(titles) == len(maps) == 1 + len(passes) and maps[0, 0] == 0
        image = shown.pixels[index : index + 1]
        for entry, shown_map in zip([None, *passes], maps, strict=True):
            prefix = None
            if entry is not None:
                own = entry[0][entry[1]]  # prompts of this pass alone, nothing masked
                tokens = own.view(-1, *adapter.memory["start_prompt"].shape)[:, 0]
                prefix = {block: Prefix(tokens.reshape(1, -1, *tokens.shape[2:]), None)}
            weights = tower.attention(image, [block], prefix=prefix)[block]
            row = weights.mean(dim=1)[0, 0]
            if (
                kind == "rollout"
            ):  # one prompted block, the last: half stays where it was
                row = row / 2
            np.testing.assert_allclose(shown_map[2:], row[-16:], atol=SUM)
            assert float(shown_map[0]) == pytest.approx(float(row[:-17].sum()), abs=SUM)


def test_methods_without_evidence_say_so(make: Make) -> None:
    session = make("tent")
    shown = session.next_of_stream(*FOG)
    assert "forms no cliques" in app_pages.cliques_page(shown, "tent", NAMES)
    assert "keeps no cache" in app_pages.memory_page(session.tally, "tent", NAMES)
    assert "plain attention only" in app_pages.attention_page(
        session, shown, 0, "class"
    )


def test_galleries_show_every_clique_with_class_size_and_loss(make: Make) -> None:
    shown = make("scap").next_of_stream(*FOG)
    page = app_pages.cliques_page(shown, "scap", NAMES)
    cliques = describe(shown.prediction)["cliques"]
    assert cliques
    heads = re.findall(
        r"<b>(\w+)</b> · (\d+) images? · loss ([\d.-]+) → ([\d.-]+)", page
    )
    for head, clique in zip(heads, cliques, strict=True):
        losses = [f"{clique[when]['total']:.3f}" for when in ("before", "after")]
        assert head == (NAMES[clique["class"]], str(clique["size"]), *losses)
    assert page.count("<img") == sum(c["size"] for c in cliques)


def test_pages_mark_changes_and_hold_no_markup_of_a_visitor(
    make: Make, tmp_path: Path
) -> None:
    session = make()
    path = tmp_path / "<b>x.png"
    path.write_bytes(picture(1))
    shown = session.next_of_files([path], 4)
    changed = replace(shown.rows[0], before="<script>a</script>", after="'onerror='b")
    same = replace(changed, after=changed.before)
    pages = []
    for row, marks in ((changed, 1), (same, 0)):
        page = app_pages.predictions_page(replace(shown, rows=(row,)), "tent")
        assert page.count("cq-changed") == page.count("changed</span>") == marks
        attention = app_pages.attention_page(
            session, replace(shown, rows=(row,)), 0, "class"
        )
        pages += [page, attention]
    for text in (*pages, app_pages.notice("<u>", bad=True, items=["<s>"])):
        assert not re.search(r"<(script|b>x|u>|s>)", text) and "='b" not in text
