"""Rejection and calibration: scores, limits and temperatures by hand, and their part of a state."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cliquetta.errors import UserError
from cliquetta.methods.building import zero_shot_reference as zsr
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.frozen import FrozenAdapter, freeze
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.building.state import load_state, merge_states, pack_state
from cliquetta.methods.building.zero_shot_reference import CONFIDENCES, LEFT_OUT
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
    orthogonal = torch.linalg.qr(torch.randn(16, 8, generator=generator))[0]
    centres = orthogonal.T
    truth = torch.randint(8, (4000,), generator=generator)
    noise = torch.randn(4000, 16, generator=generator)
    images = centres[truth] + 0.15 * noise
    logits = 30 * normalize(images, dim=1) @ centres[:4].T

    window = zsr.empty_window()
    parts = []
    for part in logits.split(64):
        rejection, window = zsr.reject(part, part, window, 0.75)
        parts.append(rejection.rejected)

    rejected = torch.cat(parts).float()
    share_of_strangers = float(rejected[truth >= 4].mean())
    share_of_known = float(rejected[truth < 4].mean())

    assert share_of_strangers == pytest.approx(0.75, abs=0.1)
    assert share_of_known < 0.02


def test_the_score_is_the_mean_of_the_methods_and_of_zero_shots() -> None:
    adapted = 20 * draw(9, 5)
    plain = 20 * draw(9, 5, seed=1)
    empty = zsr.empty_window().double()
    rejection, window = zsr.reject(adapted, plain, empty, 0.5)

    score_of_method = zsr.rejection_score(adapted)
    score_of_zero_shot = zsr.rejection_score(plain)
    score = (score_of_method + score_of_zero_shot) / 2

    torch.testing.assert_close(rejection.score, score)
    left_out_of_method = zsr.left_out_score(adapted)
    left_out_of_zero_shot = zsr.left_out_score(plain)
    left_out = (left_out_of_method + left_out_of_zero_shot) / 2

    torch.testing.assert_close(window[-9:].float(), left_out)
    assert torch.equal(rejection.rejected, score > left_out.median())


def test_the_window_holds_the_latest_images_only() -> None:
    logits = 20 * draw(zsr.WINDOW + 100, 4)
    window = zsr.empty_window()
    for part in logits.split(33):
        _, window = zsr.reject(part, part, window, 0.5)

    scores = zsr.left_out_score(logits)
    latest = scores[-zsr.WINDOW :]
    torch.testing.assert_close(window, latest)


def test_joined_windows_hold_all_scores_where_there_is_room() -> None:
    first = zsr.empty_window()
    first[-2:] = torch.tensor([0.3, 0.1])
    second = zsr.empty_window()
    second[-1:] = torch.tensor([0.2])
    joined = zsr.merge_windows([first, second])
    scores = joined[joined.isfinite()]

    torch.testing.assert_close(scores, torch.tensor([0.1, 0.2, 0.3]))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_full_windows_are_joined_to_evenly_spaced_scores(share: float) -> None:
    first, second = draw(2, zsr.WINDOW).sigmoid().float()
    scores = torch.cat([first, second])
    exact = float(scores.quantile(1 - share))

    joined = zsr.merge_windows([first, second])
    limit = float(zsr.rejection_limit(joined, share))
    spacing = 4 / zsr.WINDOW
    assert limit == pytest.approx(exact, abs=spacing)


def test_empty_windows_are_joined_to_an_empty_one() -> None:
    joined = zsr.merge_windows([zsr.empty_window(), zsr.empty_window()])
    assert not joined.isfinite().any()


def test_the_rejection_score_by_hand() -> None:
    undecided = [7.0, 7.0, 7.0, 7.0]
    # probabilities 2/5, 1/5, 1/5, 1/5 once softened
    leaning = [zsr.SOFTENING * math.log(2), 0.0, 0.0, 0.0]
    entropy = 0.4 * math.log(2.5) + 0.6 * math.log(5)
    by_hand = entropy / math.log(4)
    scores = zsr.rejection_score(torch.tensor([leaning, undecided]))

    assert scores.tolist() == pytest.approx([by_hand, 1.0])


def test_the_left_out_score_is_that_of_a_list_without_the_class() -> None:
    logits = 20 * draw(30, 5).float()
    scores = zsr.left_out_score(logits)

    for row, score in zip(logits, scores, strict=True):
        in_order = row.double().sort().values
        without_the_best = in_order[:-1]
        p = (without_the_best / zsr.SOFTENING).softmax(dim=0)
        entropy = -float((p * p.log()).sum())
        # as a share of that of four classes
        by_hand = entropy / math.log(4)
        assert float(score) == pytest.approx(by_hand, abs=FEATURE)


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
    logits = torch.tensor([[0.0, logit]])
    zero_shot = torch.tensor([[1 - backing, backing]])
    sums = counted(logits, zero_shot)
    temperature = float(zsr.find_temperature(sums))

    odds = backing / (1 - backing)
    by_hand = logit / math.log(odds)
    assert temperature == pytest.approx(by_hand, rel=GRID)


def test_calibration_asks_the_device_for_nothing() -> None:
    """Tensors without values refuse to be read, as a GPU does while its work is recorded."""
    logits = torch.empty(4, 3, device="meta")
    nothing = zsr.no_confidences().to("meta")
    sums = zsr.count_confidences(nothing, logits, logits)
    calibrated = zsr.calibrate(logits, sums)

    assert calibrated.shape == (4, 3)


def test_a_prediction_counts_as_zero_shot_backs_it() -> None:
    """One of two predictions was changed: zero-shot gave its new class 0.2."""
    logits = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    zero_shot = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    sums = counted(logits, zero_shot)

    assert float(sums[0]) == pytest.approx(0.9 + 0.2)

    # at T both are 1 / (1 + exp(-4 / T)) = 0.55, which is beyond the last temperature
    temperature = float(zsr.find_temperature(sums))

    assert temperature == pytest.approx(zsr.TEMPERATURES[-1])


def test_scaled_predictions_are_as_sure_as_zero_shot_backs_them() -> None:
    zero_shot = (3 * draw(500, 8)).softmax(dim=1)
    logits = 2 * (zero_shot.log() + draw(500, 8, seed=1))
    predicted = logits.argmax(dim=1, keepdim=True)
    backing = zero_shot.gather(1, predicted).mean()

    temperature = zsr.find_temperature(counted(logits, zero_shot))
    scaled = (logits / temperature).softmax(dim=1)

    sure = scaled.amax(dim=1).mean()
    assert float(sure) == pytest.approx(float(backing), abs=GRID)

    sure_of_zero_shot = zero_shot.amax(dim=1).mean()
    sure_before = logits.softmax(dim=1).amax(dim=1).mean()

    assert sure < sure_of_zero_shot < sure_before


def test_older_images_count_less() -> None:
    logits = torch.tensor([[1.0, 0.0]]).expand(zsr.HALF_LIFE, 2)
    zero_shot = torch.tensor([[0.25, 0.75]]).expand(zsr.HALF_LIFE, 2)
    sums = zsr.no_confidences()

    assert float(zsr.find_temperature(sums)) == 1.0

    for _ in range(2):
        sums = zsr.count_confidences(sums, logits, zero_shot)
    # the first batch is one half-life old and counts half
    images = 1.5 * zsr.HALF_LIFE

    assert float(sums[0]) == pytest.approx(0.25 * images)


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
        assert before.rejection is None
        assert after.rejection is not None
        temperature = zsr.find_temperature(more.memory[CONFIDENCES])
        expected = before.logits / temperature.to(before.logits)
        torch.testing.assert_close(after.logits, expected)

    state = more.state_dict()
    scores = state.pop(LEFT_OUT)
    sums = state.pop(CONFIDENCES)

    assert scores.isfinite().sum() == 3 * 6
    assert sums[0] > 0
    assert state.keys() == plain.state_dict().keys()
    assert_same_state(plain, state)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_predicts_as_an_unbroken_one(method: str, tmp_path: Path) -> None:
    batches = make_batches(0, 4, 6)
    unbroken = both(method)
    expected = [unbroken.predict(images) for images in batches]

    first = both(method)
    resumed = [first.predict(images) for images in batches[:2]]
    first.save(tmp_path / "state")
    second = both(method)
    load_state(second, tmp_path / "state")
    resumed += [second.predict(images) for images in batches[2:]]

    for a, b in zip(expected, resumed, strict=True):
        assert torch.equal(a.logits, b.logits)
        assert torch.equal(a.rejection.score, b.rejection.score)
        assert torch.equal(a.rejection.rejected, b.rejection.rejected)


def test_a_state_with_rejection_is_read_without(tmp_path: Path) -> None:
    first, second = make_batches(0, 2, 6)
    writer = both("tent")
    writer.predict(first)
    writer.save(tmp_path / "state")
    reader = build("tent")
    load_state(reader, tmp_path / "state")

    assert reader.predict(second).rejection is None


def test_a_state_without_rejection_starts_it_anew(tmp_path: Path) -> None:
    first, second = make_batches(0, 2, 6)
    writer = build("tent")
    writer.predict(first)
    writer.save(tmp_path / "state")
    reader = both("tent")
    load_state(reader, tmp_path / "state")

    assert learned(reader) == [False, False]
    assert reader.predict(second).rejection is not None


def test_reset_and_another_class_list_start_both_again() -> None:
    adapter = both("zero_shot")
    (images,) = make_batches(0, 1, 6)
    adapter.predict(images)

    assert learned(adapter) == [True, True]

    other = adapter.with_classes([*NAMES, "one more"])
    assert other.reject_share == 0.5
    assert other.calibrated
    assert learned(other) == [False, False]
    assert learned(adapter) == [True, True]

    adapter.reset()
    assert learned(adapter) == [False, False]


@pytest.mark.parametrize("method", ("zero_shot", "domain_norm"))
def test_scores_and_confidences_of_copies_are_joined(method: str) -> None:
    first = both(method)
    second = both(method)
    batches = make_batches(0, 4, 6)
    for images in batches[:2]:
        first.predict(images)
    for images in batches[2:]:
        second.predict(images)

    joined = both(method)
    merge_states(joined, [pack_state(first), pack_state(second)])

    scores = joined.memory[LEFT_OUT]
    assert scores.isfinite().sum() == 4 * 6

    total = first.memory[CONFIDENCES] + second.memory[CONFIDENCES]
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

    plain = freeze([build("tent")], tmp_path / "state")
    frozen = freeze([both("tent")], tmp_path / "state")

    for _ in range(2):
        prediction = frozen.predict(second)
        expected = plain.predict(second).logits / temperature
        torch.testing.assert_close(prediction.logits, expected)
        rejection = prediction.rejection
        assert torch.equal(rejection.rejected, rejection.score > limit)


@pytest.mark.parametrize(
    ("option", "share", "calibrated"),
    [("--reject", 0.5, False), ("--calibrate", None, True)],
    ids=["rejection", "calibration"],
)
def test_a_method_that_has_learned_nothing_for_an_option_is_not_frozen_with_it(
    option: str, share: float | None, calibrated: bool
) -> None:
    unlearned = build("tent", share=share, calibrated=calibrated)
    with pytest.raises(UserError, match=option):
        FrozenAdapter(unlearned)
