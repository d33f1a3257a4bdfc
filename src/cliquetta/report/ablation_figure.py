"""The curves of an ablation in one figure, likelihood beside accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from cliquetta.evaluation.ablation import Curve, label
from cliquetta.report.style import BASELINE_LOOK, FAINT, line_look, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def ablation_figure(curves: Mapping[str, Curve]) -> Figure:
    """Named curves side by side, two in a row."""
    columns = min(2, len(curves))
    rows = -(-len(curves) // columns)
    with new_figure(4.6 * columns, 3.2 * rows) as figure:
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, (name, curve) in zip(panels, curves.items(), strict=False):
            _draw(axes, curve, name)
        for axes in panels[len(curves) :]:
            axes.set_visible(False)
    return figure


def _draw(axes: Axes, curve: Curve, name: str) -> None:
    known = [point for point in curve.points if point.mean is not None]
    places = range(len(known))  # evenly spaced: values may be words, and are rarely linear
    axes.errorbar(
        places,
        np.array([point.mean for point in known], dtype=float),
        [point.sd or 0.0 for point in known],
        capsize=3,
        elinewidth=1.2,
        **line_look(0),
    )
    axes.set_xticks(list(places), [label(point.value) for point in known])
    defaults = [i for i, point in enumerate(known) if point.value == curve.default]
    for place in defaults:
        axes.axvline(place, color=FAINT, linewidth=0.8, linestyle=":", label="default")
    if curve.baseline is not None:
        look = {key: value for key, value in BASELINE_LOOK.items() if key != "marker"}
        axes.axhline(curve.baseline, label="zero_shot", **look)
    if defaults or curve.baseline is not None:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderpad=0, ncols=2)
    axes.set_xlabel(name)
    axes.set_ylabel("top-1, %")
    other = axes.twinx()  # the likelihood shows what a method does where no answer changes
    likelihood = np.array([point.nll for point in known], dtype=float)
    other.plot(places, likelihood, marker=".", color=FAINT, alpha=0.5, linewidth=1)
    other.set_ylabel("NLL (grey)", color=FAINT)
    other.tick_params(colors=FAINT)
    other.grid(False)
    _widen(axes, 2.0)
    _widen(other, 0.05)


def _widen(axes: Axes, span: float) -> None:
    """Show at least ``span`` of the vertical axis: zoomed in, rounding would look like a trend."""
    low, high = axes.get_ylim()
    if high - low < span:
        axes.set_ylim((low + high - span) / 2, (low + high + span) / 2)
