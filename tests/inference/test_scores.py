"""Scores where labels are known, beside scikit-free counts and scipy's exact test."""

import numpy as np
import pytest
from scipy.stats import binomtest

from cliquetta.inference.scores import MethodScores
from tests._helpers.tolerance import DOUBLE

NAMES = np.array(["cat", "dog", "ship"])


def test_scores_are_those_of_arrays() -> None:
    rng = np.random.default_rng(0)
    labels, predicted, plain = NAMES[rng.integers(0, 3, (3, 200))]
    scores = MethodScores()
    for label, after, before in zip(labels, predicted, plain, strict=True):
        scores.add(label=label, predicted=after, zero_shot=before)
    right = predicted == labels
    before = plain == labels
    assert scores.images == 200
    assert scores.accuracy == pytest.approx(100 * right.mean())
    assert scores.zero_shot_accuracy == pytest.approx(100 * before.mean())
    for name in NAMES:
        own = labels == name
        assert scores.per_class[name].images == own.sum()
        assert scores.per_class[name].accuracy == pytest.approx(100 * right[own].mean())
        for other in NAMES:
            assert scores.confusion[name, other] == (own & (predicted == other)).sum()
    repaired = int((right & ~before).sum())
    broken = int((before & ~right).sum())
    test = scores.versus_zero_shot
    assert (test.repaired, test.broken) == (repaired, broken)
    expected = binomtest(repaired, repaired + broken).pvalue
    assert test.p == pytest.approx(expected, rel=DOUBLE)
    assert scores.mistakes[0][2] == max(
        n for (a, b), n in scores.confusion.items() if a != b
    )


def test_without_zero_shot_there_is_no_test() -> None:
    scores = MethodScores()
    assert scores.accuracy is None and scores.per_class == {}
    scores.add(label="cat", predicted="dog", zero_shot=None)
    assert scores.versus_zero_shot is None and scores.zero_shot_accuracy is None
    assert scores.to_dict()["accuracy"] == 0.0
