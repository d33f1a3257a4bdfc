"""Accuracy along a stream, where its datasets begin, and calibration beside torchmetrics."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassCalibrationError

from cliquetta.report.stream import accuracy_so_far, domain_starts, reliability
from tests._helpers.made_runs import predictions
from tests._helpers.tolerance import FEATURE


def test_accuracy_so_far_passes_over_unknown_labels() -> None:
    accuracy = accuracy_so_far(predictions([-1, 0, 0, -1, 1], [0, 0, 1, 1, 1]))
    assert np.isnan(accuracy[0])
    assert accuracy[1:].tolist() == [100, 50, 50, pytest.approx(200 / 3)]


def test_domains_begin_where_keys_change() -> None:
    keys = ("a/1", "a/2", "a@fog:3/1", "a/3")
    assert domain_starts(keys, ["a", "a@fog:3", "a"]) == [2, 3]
    assert domain_starts(keys[:2], ["a"]) == []
    assert domain_starts(("a/1", "mixed-in/1", "a/2", "b/1"), ["a", "b"]) == [3]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(0.26, 0.999)), min_size=1, max_size=60
    )
)
def test_calibration_error_is_that_of_torchmetrics(rows: Any) -> None:
    labels = [label for label, _ in rows]
    logits = torch.zeros(len(rows), 4)
    logits[:, 1] = torch.tensor([3 * p / (1 - p) for _, p in rows]).log()
    made = predictions(labels, [1] * len(rows))
    probabilities = logits.softmax(dim=-1)
    bins = reliability(
        type(made)(made.keys, made.labels, made.classes, probabilities[:, [1]].numpy())
    )
    metric = MulticlassCalibrationError(4, n_bins=15, norm="l1")
    wanted = float(metric(probabilities, torch.tensor(labels)))
    assert bins.error == pytest.approx(wanted, abs=FEATURE)
    assert bins.count.sum() == len(rows)
