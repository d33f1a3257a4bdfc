"""The exact paired test, beside scipy's and beside every sign pattern counted."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from cliquetta import significance
from cliquetta.significance import PairedTest, sign_flip_p
from tests._helpers.tolerance import DOUBLE


@given(st.integers(0, 60), st.integers(0, 60))
def test_one_seed_is_mcnemars_exact_test(repaired: int, broken: int) -> None:
    differences = np.array([1] * repaired + [-1] * broken + [0] * 5)
    expected = binomtest(repaired, repaired + broken).pvalue if repaired + broken else 1.0
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
    assert sign_flip_p([3.0, -1.0, 1.0]) == pytest.approx(6 / 8)  # of |±3±1±1| two are 1
    assert sign_flip_p([0.0, 0.0]) == 1.0
    values = np.random.default_rng(0).normal(0.4, 1.0, 12)
    flips = 1 - 2 * ((np.arange(2**12)[:, None] >> np.arange(12)) & 1)
    exact = np.mean(np.abs(flips @ values) >= abs(values.sum()) - 1e-12)
    assert sign_flip_p(values) == pytest.approx(exact, rel=0.02)


def test_a_test_of_counts_is_mcnemars() -> None:
    test = PairedTest.of_counts(images=50, repaired=9, broken=2)
    assert (test.images, test.repaired, test.broken) == (50, 9, 2)
    assert test.p == pytest.approx(binomtest(9, 11).pvalue, rel=DOUBLE)
