"""Described evidence against what the oracle used, and counts by hand."""

import json
from typing import Any

import pytest
import torch

from cliquetta.errors import UserError
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.scap import SCAP, evidence
from cliquetta.methods.scap.evidence import describe, summary
from cliquetta.model.attention import prompted_maps
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, Prediction
from tests._helpers.oracle import pair, scap_config
from tests._helpers.scenes import NAMES, between_similarities, build_model, make_batches
from tests._helpers.tolerance import STEP, SUM

MODEL = build_model(0)
BATCHES = make_batches(5, 2, 6)
THRESHOLD = between_similarities(MODEL, BATCHES[0], 0.7)


def adapter_of(threshold: float = THRESHOLD, **options: Any) -> SCAP:
    return SCAP(MODEL, ClassPrompts(NAMES), scap_config(threshold=threshold, **options))


@pytest.mark.parametrize(
    "options",
    [{}, {"best_class_only": True}, {"retention": False}, {"capacity": 1}],
    ids=str,
)
def test_the_description_says_what_the_oracle_used(options: dict[str, Any]) -> None:
    both = pair(MODEL, {"threshold": THRESHOLD, **options})
    for images in BATCHES:
        prediction, expected = both.step(images)
        # as a page of a report would read it
        actual = json.loads(json.dumps(describe(prediction)))
        assert actual["visual_prompts"] == "composed"
        assert actual["text_gradient"] == "vjp"

        cliques = actual["cliques"]
        members = [(c["class"], frozenset(c["members"])) for c in cliques]
        assert members == expected.cliques
        assert [c["id"] for c in cliques] == list(range(len(cliques)))
        for clique, own in zip(cliques, expected.learned, strict=True):
            assert clique["size"] == len(clique["members"])
            assert_same_losses(clique["before"], own.before)
            assert_same_losses(clique["after"], own.after)

        used = {}
        for number, image in enumerate(actual["images"]):
            for entry in image["passes"]:
                prompts = (tuple(entry["cliques"]), entry["retained"])
                used[number, entry["class"]] = prompts
        assert used == expected.used
        assert [image["top"] for image in actual["images"]] == expected.top


def assert_same_losses(described: dict[str, float], literal: Any) -> None:
    """The total is the oracle's, and the sum of its parts."""
    total = described["total"]
    assert total == pytest.approx(float(literal.total), abs=SUM)

    entropy = described["entropy"]
    concentration = described["concentration"]

    assert total == pytest.approx(entropy + concentration, abs=STEP)


def test_equal_member_sets_share_their_id() -> None:
    three_times_the_same = BATCHES[0][:1].repeat(3, 1, 1, 1)
    prediction = adapter_of(threshold=0.9).predict(three_times_the_same)
    cliques = describe(prediction)["cliques"]

    assert [clique["set"] for clique in cliques] == [0, 0, 0]
    assert [clique["after"] for clique in cliques] == [None, None, None]
    assert len({clique["class"] for clique in cliques}) == 3
    assert summary(prediction) == {
        "cliques": 3,
        "distinct_sets": 1,
        "memberships": 3,
        "mean_size": 3.0,
        "max_size": 3,
        "images": 3,
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
    prediction = adapter_of(**options).predict(BATCHES[0])
    described = describe(prediction)

    assert described["visual_prompts"] == message
    assert described["cliques"]

    for image in described["images"]:
        for entry in image["passes"]:
            assert not entry["cliques"]
            assert entry["retained"] is None

    counts = summary(prediction)
    assert counts["images_with_clique"]
    assert not counts["images_with_retained"]


def test_an_empty_batch_is_described() -> None:
    no_images = BATCHES[0][:0]
    prediction = adapter_of().predict(no_images)

    assert describe(prediction)["images"] == []
    assert summary(prediction)["images"] == 0


@pytest.mark.parametrize("read", [describe, summary])
def test_evidence_of_another_method_is_refused(read: Any) -> None:
    other = create_method("zero_shot", MODEL, NAMES).predict(BATCHES[0])
    with pytest.raises(UserError, match="scap"):
        read(other)

    without_evidence = Prediction(torch.zeros(1, 2))

    with pytest.raises(UserError, match="scap"):
        read(without_evidence)


def test_gathering_more_evidence_changes_no_logit() -> None:
    plain = adapter_of()
    explaining = adapter_of()
    explaining.collect_evidence = True
    for images in BATCHES:
        a = plain.predict(images)
        b = explaining.predict(images)
        assert torch.equal(a.logits, b.logits)
        assert describe(a)["cliques"][0]["after"] is None
        assert describe(b)["cliques"][0]["after"] is not None


def test_titles_of_passes_say_where_their_prompts_came_from() -> None:
    """The first image of the second batch is in one clique of its best class, in two of its third.

    All three classes have retained prompts from the first batch.
    """
    titles = {}
    for retention in (True, False):
        adapter = adapter_of(retention=retention)
        adapter.collect_evidence = True
        adapter.predict(BATCHES[0])
        passes = adapter.prompted_passes(adapter.predict(BATCHES[1]), 0)
        assert passes is not None
        titles[retention] = passes.titles

    assert titles[True] == (
        "as big red car: 1 clique + 1 retained prompt",
        "as old truck: 1 retained prompt",
        "as ship: 2 cliques + 1 retained prompt",
    )
    assert titles[False] == ("as big red car: 1 clique", "as ship: 2 cliques")


@pytest.mark.parametrize("retention", [True, False])
def test_the_map_with_all_prompts_has_the_retained_ones(
    monkeypatch: pytest.MonkeyPatch, retention: bool
) -> None:
    adapter = adapter_of(modalities="image", retention=retention)
    adapter.collect_evidence = True
    shown: list[tuple[int, list[int]]] = []

    def watched(tower: Any, pixels: Any, values: Any, blocks: Any, chosen: Any) -> Any:
        """Note how many prompts there are, and how many each map was made with."""
        shown.append((len(values), chosen.sum(dim=1).tolist()))
        return prompted_maps(tower, pixels, values, blocks, chosen)

    monkeypatch.setattr(evidence, "prompted_maps", watched)
    prediction = adapter.predict(BATCHES[0])
    mapped = adapter.explain(Batch(BATCHES[0]), prediction, maps=2).mapped

    assert len(mapped) > 0

    described = describe(prediction)
    sets = [frozenset(clique["members"]) for clique in described["cliques"]]

    for image, (count, used) in zip(mapped, shown, strict=True):
        number = image["index"]
        passes = described["images"][number]["passes"]
        retained = sum(entry["retained"] is not None for entry in passes)
        assert (retained > 0) == retention
        distinct = {members for members in sets if number in members}
        assert count == len(distinct) + retained
        # plain first, everything last
        assert used[0] == 0
        assert used[-1] == count
