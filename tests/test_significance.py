"""The exact paired test and intervals, beside scipy's, simulations and sign patterns counted."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import binomtest

from cliquetta import significance
from cliquetta.evaluation.predictions import paired_test
from cliquetta.significance import (
    PairedTest,
    mean_half_width,
    share_half_width,
    sign_flip_p,
    student_quantile,
)
from tests._helpers.made_runs import ADAPTED, LABELS, PLAIN, predictions
from tests._helpers.tolerance import DOUBLE


@given(st.integers(0, 60), st.integers(0, 60))
def test_one_seed_is_mcnemars_exact_test(repaired: int, broken: int) -> None:
    differences = np.array([1] * repaired + [-1] * broken + [0] * 5)
    expected = (
        binomtest(repaired, repaired + broken).pvalue if repaired + broken else 1.0
    )
    assert sign_flip_p(differences) == pytest.approx(expected, rel=DOUBLE)


@given(st.lists(st.integers(-3, 3), max_size=9))
def test_several_seeds_count_every_sign_pattern(differences: list[int]) -> None:
    values = np.array(differences, dtype=np.int64)
    sums = [
        abs(sum(s * v for s, v in zip(signs, differences, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    expected = statistics.mean(total >= abs(sum(differences)) for total in sums)
    assert sign_flip_p(values) == pytest.approx(expected)


def test_many_images_are_approximated(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([1] * 2560 + [-1] * 2440 + [2] * 300 + [-2] * 250)
    exact = sign_flip_p(values)
    monkeypatch.setattr(significance, "EXACT", 10)
    assert 0.0005 < exact < 0.05
    assert sign_flip_p(values) == pytest.approx(exact, rel=0.01)


def test_differences_need_not_be_whole_numbers() -> None:
    assert sign_flip_p([1.0, 2.0, 3.0]) == pytest.approx(2 / 8)
    assert sign_flip_p([3.0, -1.0, 1.0]) == pytest.approx(
        6 / 8
    )  # of |±3±1±1| two are 1
    assert sign_flip_p([0.0, 0.0]) == 1.0

    # All 2^12 patterns of signs, one by one.
    values = np.random.default_rng(0).normal(0.4, 1.0, 12)
    patterns = np.arange(2**12)[:, None]
    negative = (patterns >> np.arange(12)) & 1
    signs = 1 - 2 * negative
    sums = np.abs(signs @ values)
    exact = np.mean(sums >= abs(values.sum()) - 1e-12)
    assert sign_flip_p(values) == pytest.approx(exact, rel=0.02)


def test_a_test_of_counts_is_mcnemars() -> None:
    test = PairedTest.of_counts(images=50, repaired=9, broken=2)
    assert (test.images, test.repaired, test.broken) == (50, 9, 2)
    assert test.p == pytest.approx(binomtest(9, 11).pvalue, rel=DOUBLE)


@pytest.mark.parametrize("freedom", [5, 6, 7, 10, 20, 100])
def test_students_quantiles_are_scipys(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(
        stats.t.ppf(0.975, freedom), abs=3e-3
    )


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


def test_the_interval_of_counts_is_that_of_the_images_they_are_of() -> None:
    """Of 100 images 30 are repaired and 10 broken."""
    differences = [1] * 30 + [-1] * 10 + [0] * 60
    expected = 100 * 1.959964 * np.std(differences) / np.sqrt(100)
    test = PairedTest.of_counts(images=100, repaired=30, broken=10)
    assert test.half_width == pytest.approx(expected)
