"""Rejection and calibration: scores, limits and temperatures by hand, and their part of a state."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cliquetta.errors import UserError
from cliquetta.methods import zero_shot_reference as zsr
from cliquetta.methods.base import Adapter
from cliquetta.methods.building.frozen import FrozenAdapter, freeze
from cliquetta.methods.registry import create_method
from cliquetta.methods.state import load_state, merge_states, pack_state
from cliquetta.methods.zero_shot_reference import CONFIDENCES, LEFT_OUT
from tests._helpers.building import assert_same_state
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tiny_world import draw
from tests._helpers.tolerance import FEATURE, LOGIT

MODEL = build_model(0)
METHODS = ("zero_shot", "tent", "tda", "domain_norm", "panda")


def build(
    method: str, *, share: float | None = None, calibrated: bool = False
) -> Adapter:
    adapter = create_method(method, MODEL, NAMES)
    adapter.enable(reject=share, calibrate=calibrated)
    return adapter


def both(method: str) -> Adapter:
    """A method that rejects and is calibrated."""
    return build(method, share=0.5, calibrated=True)


def learned(adapter: Adapter) -> list[bool]:
    """Whether it has learned anything for rejection, and for calibration."""
    scores = adapter.memory[LEFT_OUT]
    sums = adapter.memory[CONFIDENCES]
    return [bool(scores.isfinite().any()), bool(sums.any())]


# --- rejection ----------------------------------------------------------------------------------


def test_scores_by_hand() -> None:
    """The left-out score is that of a list without the class."""
    logits = torch.tensor(
        [[zsr.SOFTENING * math.log(2), 0, 0, 0], [7.0, 7.0, 7.0, 7.0]]
    )
    # probabilities 2/5, 1/5, 1/5, 1/5
    by_hand = (0.4 * math.log(2.5) + 0.6 * math.log(5)) / math.log(4)
    assert zsr.rejection_score(logits).tolist() == pytest.approx([by_hand, 1.0])
    logits = 20 * draw(30, 5).float()
    for row, score in zip(logits, zsr.left_out_score(logits), strict=True):
        rest = [
            value
            for index, value in enumerate(row.tolist())
            if index != int(row.argmax())
        ]
        weights = [math.exp(value / zsr.SOFTENING) for value in rest]
        shares = [weight / sum(weights) for weight in weights]
        by_hand = -sum(p * math.log(p) for p in shares) / math.log(4)
        assert float(score) == pytest.approx(by_hand, abs=FEATURE)


def test_the_limit_by_hand() -> None:
    window = zsr.empty_window()
    window[:5] = torch.tensor([0.9, 0.5, 0.7, 0.6, 0.8])
    # of five scores three of four exceed the second smallest
    assert float(zsr.rejection_limit(window, 0.75)) == pytest.approx(0.6)
    assert float(zsr.rejection_limit(window, 0.5)) == pytest.approx(0.7)


def test_images_of_no_class_are_rejected_at_about_the_share_that_was_asked_for() -> (
    None
):
    """Classes are directions, images lie around one of eight; the list names four of them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.linalg.qr(torch.randn(16, 8, generator=generator))[0].T
    truth = torch.randint(8, (4000,), generator=generator)
    images = centres[truth] + 0.15 * torch.randn(4000, 16, generator=generator)
    logits = 30 * normalize(images, dim=1) @ centres[:4].T
    window = zsr.empty_window()
    parts = []
    for part in logits.split(64):
        rejection, window = zsr.reject(part, part, window, 0.75)
        parts.append(rejection.rejected)
    rejected = torch.cat(parts)
    assert float(rejected[truth >= 4].float().mean()) == pytest.approx(0.75, abs=0.1)
    assert float(rejected[truth < 4].float().mean()) < 0.02


def test_the_score_is_the_mean_of_the_methods_and_of_zero_shots() -> None:
    adapted = 20 * draw(9, 5)
    plain = 20 * draw(9, 5, seed=1)
    rejection, window = zsr.reject(adapted, plain, zsr.empty_window().double(), 0.5)
    score = (zsr.rejection_score(adapted) + zsr.rejection_score(plain)) / 2
    torch.testing.assert_close(rejection.score, score)
    left_out = (zsr.left_out_score(adapted) + zsr.left_out_score(plain)) / 2
    torch.testing.assert_close(window[-9:].float(), left_out)
    assert torch.equal(rejection.rejected, score > left_out.median())


def test_the_window_holds_the_latest_images_only() -> None:
    logits = 20 * draw(zsr.WINDOW + 100, 4)
    window = zsr.empty_window()
    for part in logits.split(33):
        _, window = zsr.reject(part, part, window, 0.5)
    torch.testing.assert_close(window, zsr.left_out_score(logits)[-zsr.WINDOW :])


def test_joined_windows_hold_all_scores_or_evenly_spaced_ones() -> None:
    few = [zsr.empty_window(), zsr.empty_window()]
    few[0][-2:] = torch.tensor([0.3, 0.1])
    few[1][-1:] = torch.tensor([0.2])
    joined = zsr.merge_windows(few)
    torch.testing.assert_close(joined[joined.isfinite()], torch.tensor([0.1, 0.2, 0.3]))
    many = [*draw(2, zsr.WINDOW).sigmoid().float()]
    for share in (0.25, 0.5, 0.75):
        exact = float(torch.cat(many).quantile(1 - share))
        limit = float(zsr.rejection_limit(zsr.merge_windows(many), share))
        assert limit == pytest.approx(exact, abs=4 / zsr.WINDOW)
    assert not zsr.merge_windows([zsr.empty_window()] * 2).isfinite().any()


def test_shares_and_class_lists_that_are_refused() -> None:
    for share in (0.0, 1.0, -0.2, math.nan):
        with pytest.raises(UserError, match="above"):
            build("zero_shot", share=share)
    with pytest.raises(UserError, match="three"):
        create_method("zero_shot", MODEL, NAMES[:2]).enable_rejection()


# --- calibration --------------------------------------------------------------------------------

GRID = math.log(zsr.TEMPERATURES[1] / zsr.TEMPERATURES[0]) ** 2 / 4
"""Linear interpolation between the counted temperatures, whose curves bend by at most two."""


def counted(logits: Tensor, zero_shot: Tensor) -> Tensor:
    return zsr.count_confidences(zsr.no_confidences(), logits, zero_shot)


@pytest.mark.parametrize(("logit", "backing"), ((3.0, 0.7), (0.5, 0.7), (2.0, 0.6)))
def test_the_temperature_of_two_classes_by_hand(logit: float, backing: float) -> None:
    """1 / (1 + exp(-logit / T)) = backing."""
    sums = counted(torch.tensor([[0.0, logit]]), torch.tensor([[1 - backing, backing]]))
    by_hand = logit / math.log(backing / (1 - backing))
    assert float(zsr.find_temperature(sums)) == pytest.approx(by_hand, rel=GRID)


def test_calibration_asks_the_device_for_nothing() -> None:
    """Tensors without values refuse to be read, as a GPU does while its work is recorded."""
    logits = torch.empty(4, 3, device="meta")
    sums = zsr.count_confidences(zsr.no_confidences().to("meta"), logits, logits)
    assert zsr.calibrate(logits, sums).shape == (4, 3)


def test_a_prediction_counts_as_zero_shot_backs_it() -> None:
    """One of two predictions was changed: zero-shot gave its new class 0.2."""
    sums = counted(
        torch.tensor([[4.0, 0], [0, 4]]), torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    )
    assert float(sums[0]) == pytest.approx(1.1)
    # at T both are 1 / (1 + exp(-4 / T)) = 0.55, which is beyond the last temperature
    assert float(zsr.find_temperature(sums)) == pytest.approx(zsr.TEMPERATURES[-1])


def test_scaled_predictions_are_as_sure_as_zero_shot_backs_them() -> None:
    zero_shot = (3 * draw(500, 8)).softmax(dim=1)
    logits = 2 * (zero_shot.log() + draw(500, 8, seed=1))
    scaled = (logits / zsr.find_temperature(counted(logits, zero_shot))).softmax(dim=1)
    backing = zero_shot.gather(1, logits.argmax(dim=1, keepdim=True)).mean()
    sure = scaled.amax(dim=1).mean()
    assert float(sure) == pytest.approx(float(backing), abs=GRID)
    assert (
        sure < zero_shot.amax(dim=1).mean() < logits.softmax(dim=1).amax(dim=1).mean()
    )


def test_older_images_count_less() -> None:
    logits = torch.tensor([[1.0, 0.0]])
    zero_shot = torch.tensor([[0.25, 0.75]])
    sums = zsr.no_confidences()
    assert float(zsr.find_temperature(sums)) == 1.0
    for _ in range(2):
        batch = (value.expand(zsr.HALF_LIFE, 2) for value in (logits, zero_shot))
        sums = zsr.count_confidences(sums, *batch)
    assert float(sums[0]) == pytest.approx(1.5 * 0.25 * zsr.HALF_LIFE)


def test_zero_shot_is_calibrated_already() -> None:
    plain = build("zero_shot")
    calibrated = build("zero_shot", calibrated=True)
    for images in make_batches(0, 3, 6):
        logits = calibrated.predict(images).logits
        torch.testing.assert_close(
            logits, plain.predict(images).logits, rtol=LOGIT, atol=LOGIT
        )


# --- the state ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_a_temperature_and_rejections_are_added(method: str) -> None:
    plain = build(method)
    more = both(method)
    for images in make_batches(0, 3, 6):
        before = plain.predict(images)
        after = more.predict(images)
        assert before.rejection is None and after.rejection is not None
        temperature = zsr.find_temperature(more.memory[CONFIDENCES])
        torch.testing.assert_close(
            after.logits, before.logits / temperature.to(before.logits)
        )
    state = more.state_dict()
    assert state.pop(LEFT_OUT).isfinite().sum() == 18 and state.pop(CONFIDENCES)[0] > 0
    assert state.keys() == plain.state_dict().keys()
    assert_same_state(plain, state)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_predicts_as_an_unbroken_one(method: str, tmp_path: Path) -> None:
    batches = make_batches(0, 4, 6)
    unbroken, first, second = (both(method) for _ in range(3))
    expected = [unbroken.predict(images) for images in batches]
    resumed = [first.predict(images) for images in batches[:2]]
    first.save(tmp_path / "state")
    load_state(second, tmp_path / "state")
    resumed += [second.predict(images) for images in batches[2:]]
    for a, b in zip(expected, resumed, strict=True):
        assert torch.equal(a.logits, b.logits)
        assert torch.equal(a.rejection.score, b.rejection.score)
        assert torch.equal(a.rejection.rejected, b.rejection.rejected)


def test_a_state_goes_with_and_without_rejection(tmp_path: Path) -> None:
    first, second = make_batches(0, 2, 6)
    for name, adapter in (("more", both("tent")), ("plain", build("tent"))):
        adapter.predict(first)
        adapter.save(tmp_path / name)
    without = build("tent")
    anew = both("tent")
    load_state(without, tmp_path / "more")
    assert without.predict(second).rejection is None
    load_state(anew, tmp_path / "plain")
    assert not any(learned(anew)) and anew.predict(second).rejection is not None


def test_reset_and_another_class_list_start_both_again() -> None:
    adapter = both("zero_shot")
    adapter.predict(make_batches(0, 1, 6)[0])
    other = adapter.with_classes([*NAMES, "one more"])
    assert other.reject_share == 0.5 and other.calibrated and all(learned(adapter))
    adapter.reset()
    assert not any(learned(adapter) + learned(other))


@pytest.mark.parametrize("method", ("zero_shot", "domain_norm"))
def test_scores_and_confidences_of_copies_are_joined(method: str) -> None:
    copies = [both(method) for _ in range(2)]
    for index, images in enumerate(make_batches(0, 4, 6)):
        copies[index % 2].predict(images)
    joined = both(method)
    merge_states(joined, [pack_state(copy) for copy in copies])
    assert joined.memory[LEFT_OUT].isfinite().sum() == 24
    total = copies[0].memory[CONFIDENCES] + copies[1].memory[CONFIDENCES]
    torch.testing.assert_close(joined.memory[CONFIDENCES], total)


def test_a_frozen_method_keeps_the_limit_and_the_temperature_of_its_state(
    tmp_path: Path,
) -> None:
    first, second = make_batches(0, 2, 6)
    adapter = both("tent")
    adapter.predict(first)
    adapter.save(tmp_path / "state")
    limit = zsr.rejection_limit(adapter.memory[LEFT_OUT], 0.5)
    temperature = zsr.find_temperature(adapter.memory[CONFIDENCES]).double()
    plain, frozen = (
        freeze([one], tmp_path / "state") for one in (build("tent"), both("tent"))
    )
    for _ in range(2):
        prediction = frozen.predict(second)
        torch.testing.assert_close(
            prediction.logits, plain.predict(second).logits / temperature
        )
        assert torch.equal(
            prediction.rejection.rejected, prediction.rejection.score > limit
        )
    for option, unlearned in (
        ("--reject", build("tent", share=0.5)),
        ("--calibrate", build("tent", calibrated=True)),
    ):
        with pytest.raises(UserError, match=option):
            FrozenAdapter(unlearned)
