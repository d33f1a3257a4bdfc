"""Images of none of the classes: the score by hand, the limit by hand, and its place in a state."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter
from cliquetta.methods.building.frozen import FrozenAdapter, freeze
from cliquetta.methods.registry import create_method
from cliquetta.methods.state import load_state, merge_states, pack_state
from cliquetta.methods.zero_shot_reference import (
    LEFT_OUT,
    SOFTENING,
    WINDOW,
    empty_window,
    left_out_score,
    merge_windows,
    reject,
    rejection_limit,
    rejection_score,
)
from cliquetta.model.clip import CLIP
from cliquetta.types import Prediction
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tolerance import FEATURE

METHODS = ("zero_shot", "tent", "tda", "domain_norm")


@pytest.fixture(scope="module")
def model() -> CLIP:
    return build_model(0)


def build(model: CLIP, method: str, share: float | None = 0.5) -> Adapter:
    adapter = create_method(method, model, NAMES)
    if share is not None:
        adapter.enable_rejection(share)
    return adapter


def decisions(adapter: Adapter, batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Scores and decisions for all images."""
    scores, rejected = [], []
    for images in batches:
        found = adapter.predict(images).rejection
        assert found is not None
        scores.append(found.score)
        rejected.append(found.rejected)
    return torch.cat(scores), torch.cat(rejected)


def test_the_score_of_four_classes_by_hand() -> None:
    logits = torch.tensor([[SOFTENING * math.log(2), 0.0, 0.0, 0.0], [7.0, 7.0, 7.0, 7.0]])
    # probabilities 2/5, 1/5, 1/5, 1/5; without the first 1/3 each
    by_hand = (0.4 * math.log(2.5) + 0.6 * math.log(5)) / math.log(4)
    assert rejection_score(logits).tolist() == pytest.approx([by_hand, 1.0])
    assert left_out_score(logits).tolist() == pytest.approx([1.0, 1.0])


def test_the_left_out_score_is_that_of_a_list_without_the_answer() -> None:
    logits = 20 * torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    for row, found in zip(logits, left_out_score(logits), strict=True):
        rest = [value for place, value in enumerate(row.tolist()) if place != int(row.argmax())]
        weights = [math.exp(value / SOFTENING) for value in rest]
        shares = [weight / sum(weights) for weight in weights]
        by_hand = -sum(p * math.log(p) for p in shares) / math.log(4)
        assert float(found) == pytest.approx(by_hand, abs=FEATURE)


def test_the_limit_by_hand() -> None:
    window = empty_window()
    window[:5] = torch.tensor([0.9, 0.5, 0.7, 0.6, 0.8])
    # of five scores three of four exceed the second smallest
    assert float(rejection_limit(window, 0.75)) == pytest.approx(0.6)
    assert float(rejection_limit(window, 0.5)) == pytest.approx(0.7)


def test_images_of_no_class_are_rejected_at_about_the_share_that_was_asked_for() -> None:
    """Classes are directions, images lie around one of eight; the list names four of them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.linalg.qr(torch.randn(16, 8, generator=generator))[0].T
    truth = torch.arange(4000) % 8
    images = centres[truth] + 0.15 * torch.randn(4000, 16, generator=generator)
    logits = 30 * torch.nn.functional.normalize(images, dim=1) @ centres[:4].T
    order = torch.randperm(4000, generator=generator)
    window, rejected = empty_window(), []
    for rows in order.split(64):
        found, window = reject(logits[rows], logits[rows], window, 0.75)
        rejected.append(found.rejected)
    said = torch.cat(rejected)[order.argsort()]
    assert float(said[truth >= 4].float().mean()) == pytest.approx(0.75, abs=0.1)
    assert float(said[truth < 4].float().mean()) < 0.02


def test_the_score_is_the_mean_of_the_methods_and_of_zero_shots() -> None:
    generator = torch.Generator().manual_seed(0)
    adapted, plain = (20 * torch.randn(9, 5, generator=generator) for _ in range(2))
    found, window = reject(adapted, plain, empty_window(), 0.5)
    score = (rejection_score(adapted) + rejection_score(plain)) / 2
    torch.testing.assert_close(found.score, score)
    left_out = (left_out_score(adapted) + left_out_score(plain)) / 2
    torch.testing.assert_close(window[-9:], left_out)
    assert torch.equal(found.rejected, score > left_out.median())


def test_the_window_holds_the_latest_images_only() -> None:
    logits = 20 * torch.randn(WINDOW + 100, 4, generator=torch.Generator().manual_seed(0))
    window = empty_window()
    for part in logits.split(33):
        _, window = reject(part, part, window, 0.5)
    torch.testing.assert_close(window, left_out_score(logits)[-WINDOW:])


@pytest.mark.parametrize("method", METHODS)
def test_nothing_else_changes(model: CLIP, method: str) -> None:
    plain, rejecting = build(model, method, None), build(model, method)
    for images in make_batches(0, 3, 6):
        before, after = plain.predict(images), rejecting.predict(images)
        assert before.rejection is None
        assert torch.equal(before.logits, after.logits)
    state = rejecting.state_dict()
    assert state.pop(LEFT_OUT).isfinite().sum() == 18
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items())
    assert state.keys() == plain.state_dict().keys()


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_decides_as_an_unbroken_one(model: CLIP, method: str, tmp_path: Path) -> None:
    batches = make_batches(0, 4, 6)
    unbroken, first, second = (build(model, method) for _ in range(3))
    whole = decisions(unbroken, batches)
    begun = decisions(first, batches[:2])
    first.save(tmp_path / "state")
    load_state(second, tmp_path / "state")
    rest = decisions(second, batches[2:])
    for together, a, b in zip(whole, begun, rest, strict=True):
        assert torch.equal(together, torch.cat([a, b]))


def test_a_state_goes_with_and_without_rejection(model: CLIP, tmp_path: Path) -> None:
    batches = make_batches(0, 2, 6)
    rejecting, plain = build(model, "tent"), build(model, "tent", None)
    for adapter in (rejecting, plain):
        adapter.predict(batches[0])
    rejecting.save(tmp_path / "rejecting")
    plain.save(tmp_path / "plain")
    without = build(model, "tent", None)
    load_state(without, tmp_path / "rejecting")
    assert without.predict(batches[1]).rejection is None
    anew = build(model, "tent")
    load_state(anew, tmp_path / "plain")
    assert not anew.memory[LEFT_OUT].isfinite().any()
    assert anew.predict(batches[1]).rejection is not None


def test_reset_and_another_class_list_start_the_limit_again(model: CLIP) -> None:
    adapter = build(model, "zero_shot")
    adapter.predict(make_batches(0, 1, 6)[0])
    other = adapter.with_classes([*NAMES, "one more"])
    assert other.reject_share == 0.5
    assert not other.memory[LEFT_OUT].isfinite().any()
    adapter.reset()
    assert not adapter.memory[LEFT_OUT].isfinite().any()


def test_joined_windows_hold_all_scores_or_evenly_spaced_ones() -> None:
    few = [empty_window(), empty_window()]
    few[0][-2:], few[1][-1:] = torch.tensor([0.3, 0.1]), torch.tensor([0.2])
    joined = merge_windows(few)
    torch.testing.assert_close(joined[joined.isfinite()], torch.tensor([0.1, 0.2, 0.3]))
    generator = torch.Generator().manual_seed(0)
    many = [torch.rand(WINDOW, generator=generator), 0.5 * torch.rand(WINDOW, generator=generator)]
    for share in (0.25, 0.5, 0.75):
        exact = float(torch.cat(many).quantile(1 - share))
        assert float(rejection_limit(merge_windows(many), share)) == pytest.approx(
            exact, abs=4 / WINDOW
        )
    assert not merge_windows([empty_window()] * 2).isfinite().any()


@pytest.mark.parametrize("method", ("zero_shot", "domain_norm"))
def test_what_several_copies_learned_is_joined(model: CLIP, method: str) -> None:
    batches = make_batches(0, 4, 6)
    copies = [build(model, method) for _ in range(2)]
    for place, images in enumerate(batches):
        copies[place % 2].predict(images)
    joined = build(model, method)
    merge_states(joined, [pack_state(copy) for copy in copies])
    assert joined.memory[LEFT_OUT].isfinite().sum() == 24


def test_a_frozen_method_keeps_the_limit_of_its_state(model: CLIP, tmp_path: Path) -> None:
    first, second = make_batches(0, 2, 6)
    adapter = build(model, "tent")
    adapter.predict(first)
    adapter.save(tmp_path / "state")
    limit = rejection_limit(adapter.memory[LEFT_OUT], 0.5)
    frozen = freeze([build(model, "tent")], tmp_path / "state")
    for _ in range(2):
        found: Prediction = frozen.predict(second)
        assert found.rejection is not None
        assert torch.equal(found.rejection.rejected, found.rejection.score > limit)
    with pytest.raises(UserError, match="saved without --reject"):
        FrozenAdapter(build(model, "tent"))


@pytest.mark.parametrize("share", (0.0, 1.0, -0.2, math.nan))
def test_shares_that_are_refused(model: CLIP, share: float) -> None:
    with pytest.raises(UserError, match="above 0 and below 1"):
        build(model, "zero_shot", share)


def test_two_classes_are_refused(model: CLIP) -> None:
    with pytest.raises(UserError, match="at least three, got 2"):
        create_method("zero_shot", model, NAMES[:2]).enable_rejection()
