"""Curves of settings."""

from typing import Any

import numpy as np
import pytest

from cliquetta.report.curves import find_curves


def test_curves_vary_one_setting_and_nothing_else(ablation: Any) -> None:
    curves = {curve.field: curve for curve in find_curves(ablation)}
    assert set(curves) == {"threshold", "batch_size", "components"}
    threshold = curves["threshold"]
    assert [point.value for point in threshold.points] == [0.6, 0.8, 0.9]
    assert [sorted(point.top1) for point in threshold.points] == [
        [25],
        [50, 75],
        [62.5],
    ]
    assert threshold.default == 0.8 and threshold.baseline == pytest.approx(37.5)
    assert threshold.points[1].mean == 62.5
    assert threshold.points[1].sd == pytest.approx(np.std([50, 75], ddof=1))
    batch = curves["batch_size"]
    assert [(point.value, max(point.top1)) for point in batch.points] == [
        (4, 75),
        (8, 87.5),
    ]
    components = curves["components"]
    assert [point.value for point in components.points] == [
        "image + text",
        "text + retention",
        "image + text + retention",
    ]
