"""The temperature of adapted answers: by hand, what it promises, and its place in a state."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter
from cliquetta.methods.building.frozen import FrozenAdapter, freeze
from cliquetta.methods.registry import create_method
from cliquetta.methods.state import load_state, merge_states, pack_state
from cliquetta.methods.zero_shot_reference import (
    CONFIDENCES,
    HALF_LIFE,
    TEMPERATURES,
    count_confidences,
    find_temperature,
    no_confidences,
)
from cliquetta.model.clip import CLIP
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tolerance import LOGIT

METHODS = ("tent", "tda", "domain_norm", "panda")


@pytest.fixture(scope="module")
def model() -> CLIP:
    return build_model(0)


def build(model: CLIP, method: str, *, calibrated: bool = True) -> Adapter:
    adapter = create_method(method, model, NAMES)
    if calibrated:
        adapter.enable_calibration()
    return adapter


GRID = math.log(TEMPERATURES[1] / TEMPERATURES[0]) ** 2 / 4
"""Linear interpolation between the counted temperatures, whose curves bend by at most two."""


@pytest.mark.parametrize(("logit", "backing"), ((3.0, 0.7), (0.5, 0.7), (2.0, 0.6)))
def test_two_classes_by_hand(logit: float, backing: float) -> None:
    """1 / (1 + exp(-logit / T)) = backing."""
    by_hand = logit / math.log(backing / (1 - backing))
    zero_shot = torch.tensor([[1 - backing, backing]])
    sums = count_confidences(no_confidences(), torch.tensor([[0.0, logit]]), zero_shot)
    assert float(find_temperature(sums)) == pytest.approx(by_hand, rel=GRID)


def test_an_answer_counts_as_zero_shot_backs_it() -> None:
    """Of two images one was changed: zero-shot gave its new answer 0.2."""
    logits = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    zero_shot = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    sums = count_confidences(no_confidences(), logits, zero_shot)
    assert float(sums[0]) == pytest.approx(1.1)
    # at T both are 1 / (1 + exp(-4 / T)) = 0.55, which is beyond the last temperature
    assert float(find_temperature(sums)) == pytest.approx(TEMPERATURES[-1])


def test_scaled_answers_are_as_sure_as_zero_shot_backs_them() -> None:
    generator = torch.Generator().manual_seed(0)
    zero_shot = (3 * torch.randn(500, 8, generator=generator)).softmax(dim=1)
    logits = 2 * (zero_shot.log() + torch.randn(500, 8, generator=generator))
    temperature = find_temperature(count_confidences(no_confidences(), logits, zero_shot))
    scaled = (logits / temperature).softmax(dim=1).amax(dim=1).mean()
    backing = zero_shot.gather(1, logits.argmax(dim=1, keepdim=True)).mean()
    assert float(scaled) == pytest.approx(float(backing), abs=GRID)
    assert scaled < zero_shot.amax(dim=1).mean() < logits.softmax(dim=1).amax(dim=1).mean()


def test_older_images_count_less() -> None:
    logits = torch.tensor([[1.0, 0.0]]).expand(HALF_LIFE, 2)
    zero_shot = torch.tensor([[0.25, 0.75]]).expand(HALF_LIFE, 2)
    sums = no_confidences()
    for _ in range(2):
        sums = count_confidences(sums, logits, zero_shot)
    assert float(sums[0]) == pytest.approx(1.5 * 0.25 * HALF_LIFE)
    assert float(find_temperature(no_confidences())) == 1.0


def test_zero_shot_answers_stay_as_they_are(model: CLIP) -> None:
    plain, calibrated = build(model, "zero_shot", calibrated=False), build(model, "zero_shot")
    for images in make_batches(0, 3, 6):
        found, wanted = calibrated.predict(images).logits, plain.predict(images).logits
        torch.testing.assert_close(found, wanted, rtol=LOGIT, atol=LOGIT)


@pytest.mark.parametrize("method", METHODS)
def test_a_temperature_and_nothing_else(model: CLIP, method: str) -> None:
    plain, calibrated = build(model, method, calibrated=False), build(model, method)
    for images in make_batches(0, 3, 6):
        before, after = plain.predict(images).logits, calibrated.predict(images).logits
        temperature = find_temperature(calibrated.memory[CONFIDENCES])
        torch.testing.assert_close(after, before / temperature.to(before))
    own = calibrated.state_dict()
    assert own.pop(CONFIDENCES)[0] > 0 and own.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in own.items())


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_answers_as_an_unbroken_one(model: CLIP, method: str, tmp_path: Path) -> None:
    batches = make_batches(0, 4, 6)
    unbroken, first, second = (build(model, method) for _ in range(3))
    whole = [unbroken.predict(images).logits for images in batches]
    begun = [first.predict(images).logits for images in batches[:2]]
    first.save(tmp_path / "state")
    load_state(second, tmp_path / "state")
    rest = [second.predict(images).logits for images in batches[2:]]
    for wanted, found in zip(whole, [*begun, *rest], strict=True):
        assert torch.equal(found, wanted)


def test_joined_counts_are_those_of_all(model: CLIP) -> None:
    copies = [build(model, "zero_shot") for _ in range(2)]
    for copy, images in zip(copies, make_batches(0, 2, 6), strict=True):
        copy.predict(images)
    joined = build(model, "zero_shot")
    merge_states(joined, [pack_state(copy) for copy in copies])
    total = copies[0].memory[CONFIDENCES] + copies[1].memory[CONFIDENCES]
    torch.testing.assert_close(joined.memory[CONFIDENCES], total)


def test_frozen_reset_and_other_classes(model: CLIP, tmp_path: Path) -> None:
    first, second = make_batches(0, 2, 6)
    adapter = build(model, "tent")
    adapter.predict(first)
    adapter.save(tmp_path / "state")
    temperature = find_temperature(adapter.memory[CONFIDENCES])
    plain = freeze([build(model, "tent", calibrated=False)], tmp_path / "state")
    frozen = freeze([build(model, "tent")], tmp_path / "state")
    for _ in range(2):
        wanted = plain.predict(second).logits / temperature.to(torch.float64)
        torch.testing.assert_close(frozen.predict(second).logits, wanted)
    with pytest.raises(UserError, match="saved without --calibrate"):
        FrozenAdapter(build(model, "tent"))
    other = adapter.with_classes([*NAMES, "one more"])
    assert other.calibrated and not other.memory[CONFIDENCES].any()
    adapter.reset()
    assert not adapter.memory[CONFIDENCES].any()
