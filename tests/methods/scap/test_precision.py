"""Half-precision models: finite, remembered in float32, and near float32 in their gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.scap import SCAP
from cliquetta.methods.scap.learning import Task
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.oracle import scap_config
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tolerance import BLOCK_STORES, rounding

PROMPTS = ClassPrompts(NAMES, ("a photo of a {}.", "art of the {}."))
BATCHES = [images.float() for images in make_batches(3, 4, 6)]
HALVES = [torch.bfloat16, torch.float16]
STORES = 3 * BLOCK_STORES  # Tensors that the three blocks of the model round.


def adapter_of(dtype: torch.dtype, **options: Any) -> SCAP:
    model = build_model(0).to(dtype)
    config = scap_config(threshold=0.4, **options)
    return SCAP(model, PROMPTS, config)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"steps": 2}, {"text_per_class": True}, {"retention": False}],
    ids=str,
)
def test_half_precision_remembers_in_float32_and_predicts_nearly_alike(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    half = adapter_of(dtype, **options)
    half.collect_evidence = True
    full = adapter_of(torch.float32, **options)
    # a probability moves by at most a quarter of its logit's error, here of one
    # deviation
    unit = torch.finfo(dtype).eps / 2
    error = full.model.scale * STORES**0.5 * unit
    values = []
    for images in BATCHES:
        actual = half.predict(images)
        expected = full.predict(images)
        difference = (actual.probabilities - expected.probabilities).abs()
        assert float(difference.mean()) < error / 4

        learned = actual.evidence["learned"]
        values += [actual.logits, learned.visual, learned.text]
        values += [learned.attributes, learned.after.total]

    for name in ("start_prompt", "keys", "values", "text_mean"):
        values.append(half.memory[name])
    for value in values:
        assert value.dtype == torch.float32
        assert value.isfinite().all()

    assert int(half.memory["sets_learned"]) > 8


def start_gradients(adapter: SCAP, sets: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Visual and text gradients of fixed cliques at the start, one row each."""
    clique: list[int] = []
    image: list[int] = []
    for number, members in enumerate(sets):
        clique += [number] * len(members)
        image += members

    hidden, plain = adapter._encode(BATCHES[0])
    task = Task(
        hidden,
        plain,
        torch.tensor(clique),
        torch.tensor(image),
        len(sets),
    )
    learner = adapter.learner
    tape = learner.record(hidden, adapter.memory["start_prompt"])
    _, gradients, _ = learner._start_gradients(task, tape)
    visual = gradients["visual"].flatten(1)
    text = gradients["text"].flatten(1)
    return visual, text


@pytest.mark.parametrize("jacobian", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_are_those_of_float32_but_for_rounding(
    dtype: torch.dtype, jacobian: bool
) -> None:
    sets = [[0, 1, 2], [2, 5], [1, 3, 4, 5]]

    def gradients_in(precision: torch.dtype) -> tuple[Tensor, Tensor]:
        adapter = adapter_of(precision)
        # the same draw on both sides, and one that bfloat16 holds exactly
        start = adapter.memory["start_prompt"]
        adapter.memory["start_prompt"] = start.bfloat16().float()
        if jacobian:
            adapter.text.build_jacobian()
        return start_gradients(adapter, sets)

    in_half = gradients_in(dtype)
    in_full = gradients_in(torch.float32)

    for actual, expected in zip(in_half, in_full, strict=True):
        assert actual.dtype == torch.float32
        off = (actual - expected).norm(dim=1) / expected.norm(dim=1)
        # three blocks, once forward and twice backward; weights are rounded like
        # activations
        assert (off < rounding(dtype, 3 * STORES)).all(), off
