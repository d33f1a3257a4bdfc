"""Accuracy over the stream, and what a method gains on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cliquetta.evaluation.predictions import Predictions
from cliquetta.report.changes import net_gain
from cliquetta.report.runs import RunGroup
from cliquetta.report.style import BASELINE_LOOK, FAINT, line_look, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 240  # points drawn per line; a page must stay small


def accuracy_so_far(predictions: Predictions) -> npt.NDArray[np.float64]:
    """Percent right among the labelled images up to each image, (n,); NaN before the first."""
    known = predictions.labels >= 0
    seen = known.cumsum()
    right = (predictions.correct & known).cumsum()
    with np.errstate(invalid="ignore", divide="ignore"):
        share: npt.NDArray[np.float64] = np.where(seen > 0, 100 * right / seen, np.nan)
    return share


def domain_starts(keys: tuple[str, ...], datasets: list[str]) -> list[tuple[int, str]]:
    """Starts of the datasets of a sequence: position and id; nothing for a single one."""
    if len(datasets) < 2:
        return []
    by_length = sorted(set(datasets), key=len, reverse=True)
    owners = [next((id for id in by_length if key.startswith(f"{id}/")), "") for key in keys]
    return [
        (index, owner)
        for index, owner in enumerate(owners)
        if index == 0 or owners[index - 1] != owner
    ]


def stream_figure(group: RunGroup) -> Figure:
    """Accuracy so far of every run, and below it the predictions gained over zero-shot."""
    base = group.baseline
    both = base is not None and bool(group.adapted)
    with new_figure(6.8, 4.6 if both else 3.0) as figure:
        axes = figure.subplots(
            2 if both else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 2][: 1 + both]
        )[:, 0]
        images = len(group.runs[0].predictions)  # evenly spread points, the last image included
        drawn = np.unique(np.linspace(0, images - 1, min(images, _POINTS)).round().astype(np.int64))
        for turn, run in enumerate(group.adapted):
            look = line_look(turn) | {"marker": ""}
            label = group.labels[run.id]
            values = accuracy_so_far(run.predictions)[drawn]
            axes[0].plot(drawn + 1, values, label=f"{label}  {values[-1]:.1f} %", **look)
            if base is not None:
                gain = net_gain(base.predictions, run.predictions)[drawn]
                axes[1].step(drawn + 1, gain, where="post", **look)
        if base is not None:
            values = accuracy_so_far(base.predictions)[drawn]
            label = f"{group.labels[base.id]}  {values[-1]:.1f} %"
            axes[0].plot(drawn + 1, values, label=label, **BASELINE_LOOK)
        _finish(axes[0], group, "right so far, %")
        _leave_the_start_out(axes[0])
        axes[0].legend(loc="best", ncols=1 if len(group.runs) < 7 else 2)
        if both:
            axes[1].axhline(0, color=FAINT, linewidth=1)
            _finish(axes[1], group, "predictions gained")
            low, high = axes[1].get_ylim()
            axes[1].set_ylim(min(low, -1.3), max(high, 1.3))
            axes[1].yaxis.get_major_locator().set_params(integer=True)
        axes[-1].set_xlabel("images seen")
    return figure


def _leave_the_start_out(axes: Axes) -> None:
    """Scale to what comes after the first tenth: the mean of a few images jumps from 0 to 100."""
    lines = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()]
    heights = np.concatenate([values[len(values) // 10 :] for values in lines])
    if not np.isnan(heights).all():
        low, high = np.nanmin(heights), np.nanmax(heights)
        room = max(2.0, 0.15 * (high - low))
        axes.set_ylim(max(-1.0, low - room), min(101.0, high + room))


def _finish(axes: Axes, group: RunGroup, label: str) -> None:
    axes.set_ylabel(label)
    axes.margins(x=0.01)
    first = group.runs[0]
    ids = [entry["id"] for entry in first.record.settings["stream"]["datasets"]]
    starts = [] if first.order == "mixed" else domain_starts(first.predictions.keys, ids)
    for start, _ in starts[1:]:
        axes.axvline(start + 1, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
