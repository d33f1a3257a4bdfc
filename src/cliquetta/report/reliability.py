"""Reliability diagrams: how often a prediction is right, by its confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from cliquetta.evaluation.metrics import BINS
from cliquetta.evaluation.predictions import Predictions
from cliquetta.report.runs import ReportedRun, RunGroup
from cliquetta.report.style import COLOURS, FAINT, INK, PAPER, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Reliability:
    """Predictions by confidence, in bins of equal width."""

    edges: npt.NDArray[np.float64]  # (bins + 1,)
    count: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float64]  # mean of each bin; NaN in an empty one
    accuracy: npt.NDArray[np.float64]

    @property
    def error(self) -> float:
        """Expected calibration error: the mean gap, weighted by count; 0 to 1."""
        gaps = np.abs(self.accuracy - self.confidence)
        return float(np.nansum(gaps * self.count) / max(1, self.count.sum()))


def reliability(predictions: Predictions, bins: int = BINS) -> Reliability:
    """Bins of the labelled predictions; a bin holds its lower edge, the last one both.

    The edges are torchmetrics' own, so that the error is the one of the record; there, only
    confidences of exactly 1 have a bin to themselves.
    """
    known = predictions.labels >= 0
    confidence = predictions.probabilities[known, 0]
    right = predictions.correct[known].astype(np.float64)
    edges = torch.linspace(0, 1, bins + 1).numpy()
    slot = np.clip(np.digitize(confidence, edges) - 1, 0, bins - 1)
    count = np.bincount(slot, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(slot, confidence, bins) / count
        accuracy = np.bincount(slot, right, bins) / count
    return Reliability(edges.astype(np.float64), count, mean, accuracy)


def reliability_figure(group: RunGroup) -> Figure:
    """One panel per run: accuracy by confidence over a histogram of the confidences."""
    columns = min(4, len(group.runs))
    rows = -(-len(group.runs) // columns)
    with new_figure(max(2.6 * columns, 3.4), 3.3 * rows) as figure:
        grid = figure.subplots(
            2 * rows, columns, squeeze=False, sharex=True, height_ratios=[3, 1] * rows
        )
        for turn in range(rows * columns):
            row, column = divmod(turn, columns)
            upper, lower = grid[2 * row, column], grid[2 * row + 1, column]
            if turn >= len(group.runs):
                upper.set_axis_off()
                lower.set_axis_off()
                continue
            run = group.runs[turn]
            _panel(upper, lower, run, group.labels[run.id])
            if column == 0:
                upper.set_ylabel("right, %")
                lower.set_ylabel("predictions, %")
    return figure


def _panel(upper: Axes, lower: Axes, run: ReportedRun, label: str) -> None:
    bins = reliability(run.predictions)
    width = 100 / len(bins.count)
    centres = 100 * (bins.edges[:-1] + bins.edges[1:]) / 2
    accuracy, confidence = 100 * bins.accuracy, 100 * bins.confidence
    upper.bar(centres, accuracy, width * 0.94, color=COLOURS[0])
    gap, bottom = np.nan_to_num(confidence - accuracy), np.nan_to_num(accuracy)
    hatched: dict[str, Any] = {"facecolor": "none", "edgecolor": COLOURS[1], "hatch": "////"}
    upper.bar(centres, gap, width * 0.94, bottom=bottom, linewidth=0.8, **hatched)
    upper.plot([0, 100], [0, 100], color=FAINT, linewidth=1, linestyle=(0, (3, 3)))
    upper.set_title(label if len(label) < 24 else label[:22] + "…")
    error = run.metric("ece") or 100 * bins.error
    box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    upper.text(4, 97, f"ECE {error:.1f} %", va="top", color=INK, bbox=box)
    upper.set(xlim=(0, 100), ylim=(0, 102), yticks=[0, 25, 50, 75, 100])
    lower.bar(centres, 100 * bins.count / max(1, bins.count.sum()), width * 0.94, color=FAINT)
    lower.set(xlim=(0, 100), xticks=[0, 50, 100])
    lower.set_xlabel("confidence, %")
