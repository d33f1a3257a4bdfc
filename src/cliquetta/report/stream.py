"""Figures of one stream of images: accuracy over it, gains on the way, and calibration."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cliquetta.evaluation.metrics import BINS
from cliquetta.evaluation.predictions import Predictions
from cliquetta.report import style
from cliquetta.report.changes import net_gain
from cliquetta.report.runs import ReportedRun, RunGroup

_POINTS = 240  # points drawn per line; a page must stay small


def accuracy_so_far(predictions: Predictions) -> npt.NDArray[np.float64]:
    """Compute percent right among labelled images up to each image, (n,); NaN before the first."""
    labelled = predictions.labels >= 0
    seen = labelled.cumsum()
    right = (predictions.correct & labelled).cumsum()
    with np.errstate(invalid="ignore", divide="ignore"):
        percent = 100 * right / seen
    share: npt.NDArray[np.float64] = np.where(seen > 0, percent, np.nan)
    return share


def domain_starts(keys: Sequence[str], datasets: Iterable[str]) -> list[int]:
    """Find where images of another of the datasets begin; others count for none."""
    by_length = sorted(set(datasets), key=len, reverse=True)
    starts = []
    current = None
    for index, key in enumerate(keys):
        owners = (id for id in by_length if key.startswith(f"{id}/"))
        owner = next(owners, None)
        if owner is None:
            continue
        if current not in (None, owner):
            starts.append(index)
        current = owner
    return starts


def dataset_changes(run: ReportedRun) -> list[int]:
    """Find where another dataset begins in a sequence of datasets."""
    if run.order == "mixed":
        return []
    stream = run.record.settings["stream"]
    datasets = {entry["id"] for entry in stream["datasets"]}
    datasets.discard(stream.get("unknown"))  # it is mixed in
    return domain_starts(run.predictions.keys, datasets)


def stream_figure(group: RunGroup) -> style.Figure:
    """Draw accuracy so far of every run, and below it predictions gained over zero-shot."""
    base = group.baseline
    both = base is not None and bool(group.adapted)
    drawn = _drawn_images(len(group.runs[0].predictions))
    with style.new_figure(6.8, 4.6 if both else 3.0) as figure:
        heights = [3, 2] if both else [3]
        panels = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
        )
        axes = panels[:, 0]

        # Every method above, and below what it gained over zero-shot.
        for turn, run in enumerate(group.adapted):
            look = style.line_look(turn) | {"marker": ""}
            label = group.labels[run.id]
            values = accuracy_so_far(run.predictions)[drawn]
            axes[0].plot(
                drawn + 1, values, label=f"{label}  {values[-1]:.1f} %", **look
            )
            if base is not None:
                gain = net_gain(base.predictions, run.predictions)[drawn]
                axes[1].step(drawn + 1, gain, where="post", **look)
        if base is not None:
            values = accuracy_so_far(base.predictions)[drawn]
            label = f"{group.labels[base.id]}  {values[-1]:.1f} %"
            axes[0].plot(drawn + 1, values, label=label, **style.BASELINE_LOOK)

        _finish(axes[0], group, "right so far, %")
        _leave_the_start_out(axes[0])
        axes[0].legend(loc="best", ncols=1 if len(group.runs) < 7 else 2)
        if both:
            axes[1].axhline(0, color=style.FAINT, linewidth=1)
            _finish(axes[1], group, "predictions gained")

            # Gains of no image at all would be drawn as a line between whole numbers.
            low, high = axes[1].get_ylim()
            axes[1].set_ylim(min(low, -1.3), max(high, 1.3))
            axes[1].yaxis.get_major_locator().set_params(integer=True)
        axes[-1].set_xlabel("images seen")
    return figure


def _drawn_images(images: int) -> npt.NDArray[np.int64]:
    """Choose evenly spread images, the last one included."""
    spread = np.linspace(0, images - 1, min(images, _POINTS))
    return np.unique(spread.round().astype(np.int64))


def _leave_the_start_out(axes: style.Axes) -> None:
    """Scale to what comes after the first tenth: the mean of a few images jumps from 0 to 100."""
    # The first tenth of every line is left out.
    parts = []
    for line in axes.get_lines():
        values = np.asarray(line.get_ydata(), dtype=np.float64)
        parts.append(values[len(values) // 10 :])
    heights = np.concatenate(parts)
    if np.isnan(heights).all():
        return
    low = np.nanmin(heights)
    high = np.nanmax(heights)

    room = max(2.0, 0.15 * (high - low))
    axes.set_ylim(max(-1.0, low - room), min(101.0, high + room))


def _finish(axes: style.Axes, group: RunGroup, label: str) -> None:
    axes.set_ylabel(label)
    axes.margins(x=0.01)
    dotted = (0, (1, 2))
    for start in dataset_changes(group.runs[0]):
        axes.axvline(start + 1, color=style.FAINT, linewidth=1, linestyle=dotted)


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


def reliability(predictions: Predictions) -> Reliability:
    """Count labelled predictions in bins; a bin holds its lower edge, the last one both.

    The edges are torchmetrics' own, so that the error is the one of the record; there,
    only confidences of exactly 1 have a bin to themselves.
    """
    labelled = predictions.labels >= 0
    confidence = predictions.probabilities[labelled, 0]
    right = predictions.correct[labelled].astype(np.float64)

    edges = torch.linspace(0, 1, BINS + 1).numpy()
    slot = np.digitize(confidence, edges) - 1
    slot = np.clip(slot, 0, BINS - 1)

    count = np.bincount(slot, minlength=BINS)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(slot, confidence, BINS) / count
        accuracy = np.bincount(slot, right, BINS) / count
    return Reliability(
        edges=edges.astype(np.float64),
        count=count,
        confidence=mean_confidence,
        accuracy=accuracy,
    )


def reliability_figure(group: RunGroup) -> style.Figure:
    """Draw one panel per run: accuracy by confidence over a histogram of confidences."""
    columns = min(4, len(group.runs))
    rows = -(-len(group.runs) // columns)
    with style.new_figure(max(2.6 * columns, 3.4), 3.3 * rows) as figure:
        # Every run has two panels, one above the other.
        ratios = [3, 1] * rows
        grid = figure.subplots(
            2 * rows, columns, squeeze=False, sharex=True, height_ratios=ratios
        )
        for turn in range(rows * columns):
            row, column = divmod(turn, columns)
            upper = grid[2 * row, column]
            lower = grid[2 * row + 1, column]
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


def _panel(upper: style.Axes, lower: style.Axes, run: ReportedRun, label: str) -> None:
    """Draw one run: accuracy by confidence above, the share of predictions below."""
    bins = reliability(run.predictions)
    width = 0.94 * (100 / len(bins.count))
    centres = 100 * (bins.edges[:-1] + bins.edges[1:]) / 2

    # Solid bars are the accuracy; hatched ones lead from there to the confidence.
    accuracy = 100 * bins.accuracy
    gap = 100 * bins.confidence - accuracy
    upper.bar(centres, accuracy, width, color=style.COLOURS[0])
    upper.bar(
        centres,
        np.nan_to_num(gap),
        width,
        bottom=np.nan_to_num(accuracy),
        linewidth=0.8,
        facecolor="none",
        edgecolor=style.COLOURS[1],
        hatch="////",
    )
    dashed = (0, (3, 3))
    upper.plot([0, 100], [0, 100], color=style.FAINT, linewidth=1, linestyle=dashed)
    upper.set_title(label if len(label) < 24 else label[:22] + "…")

    error = run.metric("ece") or 100 * bins.error
    box = {"facecolor": style.PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    upper.text(4, 97, f"ECE {error:.1f} %", va="top", color=style.INK, bbox=box)
    upper.set(xlim=(0, 100), ylim=(0, 102), yticks=[0, 25, 50, 75, 100])

    share = 100 * bins.count / max(1, bins.count.sum())
    lower.bar(centres, share, width, color=style.FAINT)
    lower.set(xlim=(0, 100), xticks=[0, 50, 100])
    lower.set_xlabel("confidence, %")
