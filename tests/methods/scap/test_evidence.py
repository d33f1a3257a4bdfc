"""Described evidence against what the oracle used, and counts by hand."""

import json
from typing import Any

import pytest
import torch

from cliquetta.methods.scap import SCAP, SCAPConfig, evidence
from cliquetta.methods.scap.evidence import describe, summary
from cliquetta.methods.zero_shot import ZeroShot, ZeroShotConfig
from cliquetta.model.attention import prompted_maps
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, Prediction
from tests._helpers.scenes import (
    NAMES,
    between_similarities,
    build_model,
    make_batches,
    pair,
    scap_config,
)
from tests._helpers.tolerance import STEP, SUM

MODEL = build_model(0)
BATCHES = make_batches(5, 2, 6)
THRESHOLD = between_similarities(MODEL, BATCHES[0], 0.7)


@pytest.mark.parametrize(
    "options", [{}, {"best_class_only": True}, {"retention": False}, {"capacity": 1}], ids=str
)
def test_the_description_says_what_the_oracle_used(options: dict[str, Any]) -> None:
    both = pair(MODEL, {"threshold": THRESHOLD, **options})
    for images in BATCHES:
        prediction, expected = both.step(images)
        actual = json.loads(json.dumps(describe(prediction)))
        assert [
            (c["class"], frozenset(c["members"])) for c in actual["cliques"]
        ] == expected.cliques
        assert [c["id"] for c in actual["cliques"]] == list(range(len(expected.cliques)))
        for clique, before, after in zip(
            actual["cliques"], expected.losses_before, expected.losses_after, strict=True
        ):
            assert clique["size"] == len(clique["members"])
            assert clique["before"]["total"] == pytest.approx(before, abs=SUM)
            assert clique["after"]["total"] == pytest.approx(after, abs=SUM)
            for losses in (clique["before"], clique["after"]):
                parts = losses["entropy"] + losses["concentration"]
                assert losses["total"] == pytest.approx(parts, abs=STEP)
        used = {
            (j, entry["class"]): (tuple(entry["cliques"]), entry["retained"])
            for j, image in enumerate(actual["images"])
            for entry in image["passes"]
        }
        assert used == expected.used
        assert [image["top"] for image in actual["images"]] == expected.top
        assert actual["visual_prompts"] == "composed"
        assert actual["text_gradient"] == "vjp"


def test_equal_member_sets_share_their_id() -> None:
    adapter = SCAP(MODEL, ClassPrompts(NAMES), SCAPConfig(threshold=0.9))
    prediction = adapter.predict(BATCHES[0][:1].repeat(3, 1, 1, 1))
    cliques = describe(prediction)["cliques"]
    assert [clique["set"] for clique in cliques] == [0, 0, 0]
    assert len({clique["class"] for clique in cliques}) == 3
    assert [clique["after"] for clique in cliques] == [None, None, None]
    assert summary(prediction) == {
        "images": 3,
        "cliques": 3,
        "distinct_sets": 1,
        "memberships": 3,
        "mean_size": 3.0,
        "max_size": 3,
        "images_with_clique": 3,
        "images_with_retained": 3,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [({"discarded_prompts": True}, "discarded"), ({"modalities": "text"}, "none")],
)
def test_prompts_that_were_not_scored_with_are_not_claimed(
    options: dict[str, Any], message: str
) -> None:
    adapter = SCAP(MODEL, ClassPrompts(NAMES), scap_config(threshold=THRESHOLD, **options))
    prediction = adapter.predict(BATCHES[0])
    actual = describe(prediction)
    assert actual["visual_prompts"] == message
    assert actual["cliques"]
    for image in actual["images"]:
        assert all(not p["cliques"] and p["retained"] is None for p in image["passes"])
    assert summary(prediction)["images_with_clique"] > 0
    assert summary(prediction)["images_with_retained"] == 0


def test_an_empty_batch_is_described() -> None:
    adapter = SCAP(MODEL, ClassPrompts(NAMES), SCAPConfig())
    prediction = adapter.predict(BATCHES[0][:0])
    assert describe(prediction)["images"] == []
    assert summary(prediction)["images"] == 0


def test_evidence_of_another_method_is_refused() -> None:
    other = ZeroShot(MODEL, ClassPrompts(NAMES), ZeroShotConfig()).predict(BATCHES[0])
    for read in (describe, summary):
        with pytest.raises(ValueError, match="not that of scap"):
            read(other)
    with pytest.raises(ValueError, match="not that of scap"):
        describe(Prediction(torch.zeros(1, 2)))


def test_gathering_more_evidence_changes_no_logit() -> None:
    plain, explaining = (
        SCAP(MODEL, ClassPrompts(NAMES), SCAPConfig(threshold=THRESHOLD)) for _ in range(2)
    )
    explaining.collect_evidence = True
    for images in BATCHES:
        a, b = plain.predict(images), explaining.predict(images)
        assert torch.equal(a.logits, b.logits)
        assert describe(a)["cliques"][0]["after"] is None
        assert describe(b)["cliques"][0]["after"] is not None


@pytest.mark.parametrize("retention", [True, False])
def test_the_map_with_all_prompts_has_the_retained_ones(
    monkeypatch: pytest.MonkeyPatch, retention: bool
) -> None:
    prompts = ClassPrompts(NAMES)
    config = SCAPConfig(threshold=THRESHOLD, modalities="image", retention=retention)
    adapter = SCAP(MODEL, prompts, config)
    adapter.collect_evidence = True
    shown: list[tuple[int, list[int]]] = []

    def watched(tower: Any, pixels: Any, values: Any, blocks: Any, chosen: Any) -> Any:
        shown.append((len(values), chosen.sum(dim=1).tolist()))
        return prompted_maps(tower, pixels, values, blocks, chosen)

    monkeypatch.setattr(evidence, "prompted_maps", watched)
    batch = Batch(BATCHES[0])
    prediction = adapter.predict(batch)
    mapped = adapter.explain(batch, prediction, maps=2).mapped
    assert len(shown) == len(mapped) > 0
    for index, (count, used) in zip(mapped, shown, strict=True):
        passes = describe(prediction)["images"][index["place"]]["passes"]
        retained = sum(entry["retained"] is not None for entry in passes)
        assert (retained > 0) == retention
        distinct = {
            frozenset(clique["members"])
            for clique in describe(prediction)["cliques"]
            if index["place"] in clique["members"]
        }
        assert count == len(distinct) + retained
        assert used[0] == 0 and used[-1] == count  # plain first, everything last
