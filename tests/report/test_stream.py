"""Accuracy along a stream, and where its datasets begin."""

import numpy as np
import pytest

from cliquetta.report.stream import accuracy_so_far, domain_starts
from tests._helpers.made_runs import predictions


def test_accuracy_so_far_passes_over_unknown_labels() -> None:
    accuracy = accuracy_so_far(predictions([-1, 0, 0, -1, 1], [0, 0, 1, 1, 1]))
    assert np.isnan(accuracy[0])
    assert accuracy[1:].tolist() == [100, 50, 50, pytest.approx(200 / 3)]


def test_domains_begin_where_keys_change() -> None:
    keys = ("a/1", "a/2", "a@fog:3/1", "a/3")
    assert domain_starts(keys, ["a", "a@fog:3", "a"]) == [(0, "a"), (2, "a@fog:3"), (3, "a")]
    assert domain_starts(keys, ["a"]) == []
