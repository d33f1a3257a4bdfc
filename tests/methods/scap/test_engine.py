"""The engine agrees with the literal oracle: cliques, prompts, losses, memory, predictions."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cliquetta.model import cuda
from cliquetta.model.vjp import VisualTape
from tests._helpers.oracle import Pair, listed, pair
from tests._helpers.scenes import NAMES, between_similarities, build_model, make_batches
from tests._helpers.tolerance import FEATURE, SUM, assert_near
from tests.reference.scap_reference import ReferenceResult

MODELS = {seed: build_model(seed) for seed in (0, 1)}


def check_agreement(both: Pair, batches: list[torch.Tensor]) -> int:
    """Compare everything over a stream; the number of cliques seen."""
    total = 0
    for images in batches:
        prediction, expected = both.step(images)
        cliques = prediction.evidence["cliques"]
        assert listed(cliques) == expected.cliques
        total += len(expected.cliques)

        probabilities = prediction.logits.double().softmax(dim=-1)
        assert_near(probabilities, expected.probabilities, FEATURE)

        learned = prediction.evidence["learned"]
        for u, own in zip(cliques.set_of.tolist(), expected.learned, strict=True):
            if own.visual is not None:
                assert_near(learned.visual[u], own.visual, SUM)
            if own.text is not None:
                assert_near(learned.text[u], own.text, SUM)
            assert_near(learned.attributes[u], own.key, FEATURE)
            assert_near(learned.before.total[u], own.before.total, SUM)
            assert_near(learned.after.total[u], own.after.total, SUM)
        check_memory(both.engine.memory, expected)
    return total


def check_memory(memory: Any, expected: ReferenceResult) -> None:
    """Compare retained prompts and the mean of text prompts."""
    for label, entries in expected.retained.items():
        assert int(memory["count"][label]) == len(entries)
        keys = memory["keys"][label]
        values = memory["values"][label]
        for slot, (key, value) in enumerate(entries):
            assert_near(keys[slot], key, SUM)
            assert_near(values[slot], value.flatten(), SUM)

    if expected.text_mean is not None:
        assert_near(memory["text_mean"], expected.text_mean, SUM)
        assert int(memory["text_seen"]) == expected.tau


def agree(options: dict[str, Any], size: int = 6) -> int:
    """Compare engine and oracle under some options over three batches."""
    batches = make_batches(5, 3, size)
    threshold = between_similarities(MODELS[0], batches[0], 0.55)
    both = pair(MODELS[0], {"threshold": threshold, **options})
    return check_agreement(both, batches)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"steps": 3},
    {"concentration": 0.0},
    {"modalities": "image"},
    {"modalities": "text"},
    {"modalities": "text", "steps": 2},
    {"retention": False},
    {"prompt_length": 2},
    {"blocks": (0,)},
    {"blocks": (2,)},
    {"blocks": (0, 2), "prompt_length": 2},
    {"blocks": (1, 2), "steps": 3},
    {"text_per_class": True},
    {"text_per_class": True, "steps": 2},
    {"text_per_class": True, "member_entropy": True, "mean_concentration": True},
    {"capacity": 1},
    {"capacity": 2, "neighbours": 1, "bandwidth": 0.8},
    {"clique_combination": "mean"},
    {"retained_combination": "mean"},
    {"clique_combination": "mean", "retained_combination": "mean"},
    {"topk": 1},
    {"topk": 9},
    {"full_sets": True},
    {"repeated_cliques": True},
    {"prompted_mining": True},
    {"member_entropy": True},
    {"member_entropy": True, "steps": 2},
    {"mean_concentration": True},
    {"weight_decay": 0.01, "steps": 2},
    {"capacity": 3, "raw_keys": True},
    {"best_class_only": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_agrees_with_the_oracle(options: dict[str, Any]) -> None:
    assert agree(options) > 3


@pytest.mark.parametrize(
    "options", [{"capacity": 1}, {"capacity": 2, "blocks": (0,)}], ids=str
)
def test_rows_filled_up_as_on_a_gpu_agree_with_the_oracle(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    pull = VisualTape._pull

    def counted(
        tape: VisualTape, cotangents: Tensor, index: Tensor | None
    ) -> tuple[Tensor, ...]:
        sizes.append(len(cotangents))
        return pull(tape, cotangents, index)

    monkeypatch.setitem(cuda.CHUNK, "cpu", 16)
    monkeypatch.setattr(VisualTape, "_pull", counted)

    assert agree(options, size=9) > 3
    assert set(sizes) == {16}
    # more rows than one chunk holds
    assert len(sizes) > 3


@pytest.mark.parametrize("mix", [0.0, 0.3, 0.5])
def test_several_templates_agree_with_the_oracle(mix: float) -> None:
    model = MODELS[1]
    batches = make_batches(2, 2, 6)
    threshold = between_similarities(model, batches[0], 0.6)
    both = pair(
        model,
        {"threshold": threshold, "text_mix": mix},
        templates=("a photo of a {}.", "art of the {}.", "a {}."),
    )

    assert check_agreement(both, batches) > 0


WORLDS = {
    "steps": st.sampled_from([1, 1, 2]),
    "modalities": st.sampled_from(["both", "image", "text"]),
    "capacity": st.integers(1, 4),
    "concentration": st.sampled_from([0.0, 0.3, 1.0]),
    "retention": st.booleans(),
    "best_class_only": st.booleans(),
}


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    world=st.sampled_from(sorted(MODELS)),
    seed=st.integers(0, 1000),
    size=st.integers(1, 8),
    classes=st.integers(2, 6),
    quantile=st.floats(0.2, 0.95),
    options=st.fixed_dictionaries(WORLDS),
)
def test_random_worlds_agree_with_the_oracle(
    world: int,
    seed: int,
    size: int,
    classes: int,
    quantile: float,
    options: dict[str, Any],
) -> None:
    model = MODELS[world]
    batches = make_batches(seed, 2, size)
    threshold = between_similarities(model, torch.cat(batches), quantile)
    both = pair(
        model,
        {"threshold": threshold, **options},
        names=NAMES[:classes],
        seed=seed,
    )
    check_agreement(both, batches)
