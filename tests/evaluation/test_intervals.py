"""Half-widths of 95 % intervals against scipy, a simulation and hand-made cases."""

import numpy as np
import pytest
from scipy import stats

from cliquetta.evaluation.intervals import mean_half_width, share_half_width, student_quantile
from cliquetta.evaluation.predictions import paired_test
from tests._helpers.made_runs import ADAPTED, LABELS, PLAIN, predictions


@pytest.mark.parametrize("freedom", [5, 6, 7, 10, 20, 100])
def test_students_quantiles_are_scipys(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=3e-3)


def test_the_interval_of_a_few_gains_is_students() -> None:
    gains = [1.0, 2.5, -0.5, 3.0, 2.0, 1.5]
    low, high = stats.t.interval(0.95, 5, np.mean(gains), stats.sem(gains))
    assert mean_half_width(gains) == pytest.approx((high - low) / 2, rel=2e-3)


def test_the_interval_of_a_paired_gain_holds_the_truth_in_95_of_100_draws() -> None:
    """3 % of all images are repaired and 1 % broken, in 2,000 draws of 1,000 images."""
    rng = np.random.default_rng(0)
    draws = rng.multinomial(1000, [0.03, 0.01, 0.96], size=2000)
    inside = 0
    for repaired, broken, _ in draws:
        gain = 100 * (repaired - broken) / 1000
        inside += abs(gain - 2.0) <= share_half_width(int(repaired), int(broken), 1000)
    assert 0.93 < inside / len(draws) < 0.97


def test_a_paired_test_has_the_interval_of_its_images() -> None:
    """Of 8 images one is repaired and two are broken; two equal seeds tell no more than one."""
    pair = predictions(LABELS, PLAIN), predictions(LABELS, ADAPTED)
    once = paired_test([pair])
    assert once.half_width == pytest.approx(share_half_width(1, 2, 8))
    assert once.half_width == pytest.approx(
        100 * 1.959964 * np.std([1, -1, -1, 0, 0, 0, 0, 0]) / np.sqrt(8)
    )
    assert paired_test([pair, pair]).half_width == pytest.approx(once.half_width)
