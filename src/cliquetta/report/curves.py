"""Curves of a setting: accuracy over a hyper-parameter, over components, over the batch size.

Any runs will do. A curve is drawn for a setting where runs differ in it and in nothing
else but the seed; "nothing else" is measured from the settings that most of the runs
share.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from cliquetta.evaluation.ablation import Curve, Point
from cliquetta.evaluation.comparison import average, grouped, value_text, varying
from cliquetta.evaluation.grid import BASELINE
from cliquetta.report.runs import ReportedRun, flat_settings, most_common
from cliquetta.report.style import (
    BASELINE_LOOK,
    FAINT,
    Axes,
    Figure,
    line_look,
    new_figure,
)

Pair = tuple[dict[str, Any], ReportedRun]  # settings, and a run with them
COMPONENTS = frozenset({"modalities", "retention"})
_NOT_A_SETTING = frozenset({"seed", "model", "weights"})
_BASELINE = {key: value for key, value in BASELINE_LOOK.items() if key != "marker"}
_ERROR_BARS: dict[str, Any] = {"capsize": 3, "elinewidth": 1.2}
_MULTIPLIED = 16  # largest over smallest value from which an axis is logarithmic
_TICKS = 9


def find_curves(runs: Sequence[ReportedRun]) -> list[Curve]:
    """Find all curves that can be drawn from ``runs``, per dataset, method and setting."""
    scored = [run for run in runs if run.metric("top1") is not None]
    groups = grouped(scored, _stream_and_method)
    curves = []
    for (dataset, method, model), members in groups.items():
        zero = [] if method == BASELINE else groups.get((dataset, BASELINE, model), [])
        baseline = average(run.metric("top1") for run in zero)

        # What most of the runs have is what all points of a curve share.
        settings = [flat_settings(run) for run in members]
        keys = [key for key in varying(settings) if key not in _NOT_A_SETTING]
        common = {
            key: most_common([each.get(key) for each in settings]) for key in keys
        }
        pairs = list(zip(settings, members, strict=True))

        # Components that vary both are one curve: its points name the combinations.
        if COMPONENTS.issubset(keys):
            points = _component_points(_usual(pairs, common, COMPONENTS))
            curves.append(Curve("components", None, points, baseline))
            keys = [key for key in keys if key not in COMPONENTS]
        for key in keys:
            usual = _usual(pairs, common, {key})
            points = _points([(setting.get(key), run) for setting, run in usual])
            curves.append(Curve(key, common[key], points, baseline))
    return [curve for curve in curves if len(curve.points) > 1]


def _stream_and_method(run: ReportedRun) -> tuple[str, str, str]:
    """Return dataset, method and model, which all points of a curve share."""
    record = run.record
    return record.dataset, record.method, record.settings["model"]["id"]


def _usual(
    pairs: Sequence[Pair], common: Mapping[str, Any], but: Set[str]
) -> list[Pair]:
    """Choose the runs with the settings that most have, ``but`` for some."""
    wanted = {key: value for key, value in common.items() if key not in but}
    return [
        (setting, run)
        for setting, run in pairs
        if all(setting.get(key) == value for key, value in wanted.items())
    ]


def _points(pairs: Sequence[tuple[Any, ReportedRun]]) -> tuple[Point, ...]:
    """Make a point of the runs at each value; in order where values have one."""
    points = []
    for members in grouped(pairs, lambda pair: repr(pair[0])).values():
        value = members[0][0]
        records = tuple(run.record for _, run in members)
        size = average(_clique_size(run) for _, run in members)
        points.append(Point(value, records, clique_size=size))

    # Values of several types, such as a number and none, have no order.
    try:
        return tuple(sorted(points, key=lambda point: point.value))
    except TypeError:
        return tuple(points)


def _component_points(pairs: Sequence[Pair]) -> tuple[Point, ...]:
    """Name the points of the component ablation: what is learned, with and without retention."""
    order = ("image", "text", "both")
    words = ("image", "text", "image + text")

    # Without retention first, then by what is learned.
    valued = []
    for setting, run in pairs:
        learned = order.index(setting["modalities"])
        valued.append(((setting["retention"], learned), run))

    points = []
    for point in _points(valued):
        retention, learned = point.value
        name = words[learned] + (" + retention" if retention else "")
        points.append(replace(point, value=name))
    return tuple(points)


def _clique_size(run: ReportedRun) -> float | None:
    """Average the largest clique's size over batches."""
    counts = () if run.evidence is None else run.evidence.counts
    return average(line.get("max_size") for line in counts)


def curve_figure(curve: Curve) -> Figure:
    """Draw points, joined where the setting is a number, rows of dots where it is a choice."""
    if not all(_is_number(point.value) for point in curve.points):
        return _choices(curve)

    # Beside accuracy by batch size, the size of cliques where it was counted.
    sizes = [point.clique_size for point in curve.points]
    wide = curve.field == "batch_size" and all(size is not None for size in sizes)
    with new_figure(6.8 if wide else 3.9, 2.9) as figure:
        axes = figure.subplots(1, 2 if wide else 1, squeeze=False)[0]
        _draw(axes[0], curve)
        if wide:
            values = [point.value for point in curve.points]
            positions = _axis(axes[1], curve.field, values)
            axes[1].plot(positions, sizes, **line_look(1))
            axes[1].set_ylabel("largest clique, images")
            axes[1].set_ylim(bottom=0)
    return figure


def curves_figure(curves: Mapping[str, Curve]) -> Figure:
    """Draw named curves, two in a row, with the likelihood beside the accuracy."""
    columns = min(2, len(curves))
    rows = -(-len(curves) // columns)
    with new_figure(4.6 * columns, 3.2 * rows) as figure:
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, (name, curve) in zip(panels, curves.items(), strict=False):
            positions = _draw(axes, curve)
            axes.set_xlabel(name)
            other = axes.twinx()  # shows what a method does where no prediction changes
            likelihood = [point.nll for point in curve.points if point.nll is not None]
            other.plot(
                positions, likelihood, marker=".", color=FAINT, alpha=0.5, linewidth=1
            )
            other.set_ylabel("NLL (grey)", color=FAINT)
            other.tick_params(colors=FAINT)
            other.grid(False)
            # In points of accuracy, and in nats.
            _widen(axes, 2.0)
            _widen(other, 0.05)

        # An odd number of curves leaves a panel over.
        for axes in panels[len(curves) :]:
            axes.set_visible(False)
    return figure


def _draw(axes: Axes, curve: Curve) -> Sequence[float]:
    """Draw accuracy with error bars, the default and zero-shot; return where the points are."""
    points = [point for point in curve.points if point.mean is not None]
    values = [point.value for point in points]
    means = [point.mean or 0.0 for point in points]
    errors = [point.sd or 0.0 for point in points] if _several(curve) else None
    positions = _axis(axes, curve.field, values)
    axes.errorbar(positions, means, errors, **_ERROR_BARS, **line_look(0))
    axes.set_ylabel("top-1, %")

    marked = zip(positions, values, strict=True)
    defaults = [position for position, value in marked if value == curve.default]
    for position in defaults:
        axes.axvline(
            position, color=FAINT, linewidth=0.8, linestyle=":", label="default"
        )
    if curve.baseline is not None:
        axes.axhline(curve.baseline, label="zero_shot", **_BASELINE)
    if defaults or curve.baseline is not None:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderpad=0, ncols=2)
    return positions


def _several(curve: Curve) -> bool:
    return any(len(point.records) > 1 for point in curve.points)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _axis(axes: Axes, field: str, values: Sequence[Any]) -> Sequence[float]:
    """Set the values as ticks of the axis, and return their positions.

    Numbers that multiply are on a logarithm; words, and such numbers with a zero,
    evenly spaced.
    """
    axes.set_xlabel(field.replace("_", " "))
    numbers = all(map(_is_number, values))
    sizes = [abs(value) for value in values if value] if numbers else []
    multiply = bool(sizes) and max(sizes) / min(sizes) >= _MULTIPLIED
    positions: Sequence[float] = range(len(values))
    if numbers and not (multiply and min(values) <= 0):
        positions = values
        if multiply:
            axes.set_xscale("log", base=2 if field == "batch_size" else 10)

    # Labels of many ticks would overlap.
    step = math.ceil(len(values) / _TICKS)
    labels = [value_text(value) for value in values[::step]]
    axes.set_xticks(positions[::step], labels)
    axes.minorticks_off()
    return positions


def _widen(axes: Axes, span: float) -> None:
    """Show at least ``span`` of the vertical axis: zoomed in, rounding would look like a trend."""
    low, high = axes.get_ylim()
    if high - low < span:
        bottom = (low + high - span) / 2
        top = (low + high + span) / 2
        axes.set_ylim(bottom, top)


def _choices(curve: Curve) -> Figure:
    """Draw dots in rows: the scale need not begin at 0, as that of bars would have to."""
    with new_figure(5.6, 1.0 + 0.36 * len(curve.points)) as figure:
        axes = figure.subplots()
        for position, point in enumerate(curve.points):
            mean = point.mean or 0.0
            look = line_look(position) | {"linestyle": "none", "markersize": 7}
            error = (point.sd or 0.0) if _several(curve) else None
            axes.errorbar(mean, position, xerr=error, **_ERROR_BARS, **look)
            axes.annotate(
                f"{mean:.1f}",
                xy=(mean, position),
                xytext=(0, 6),
                fontsize=8,
                textcoords="offset points",
                ha="center",
                va="bottom",
            )
        if curve.baseline is not None:
            label = f"zero_shot {curve.baseline:.1f}"
            axes.axvline(curve.baseline, label=label, **_BASELINE)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
        axes.margins(x=0.12)
        labels = [str(point.value) for point in curve.points]
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(curve.points) - 0.5, -0.7)
        axes.set_xlabel("top-1, %")
        if curve.field != "components":
            axes.set_ylabel(curve.field.replace("_", " "))
    return figure
