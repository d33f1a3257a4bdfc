"""Curves of a setting: accuracy over a hyper-parameter, over components, over the batch size.

Any runs will do. A curve is drawn for a setting where runs differ in it and in nothing else but the
seed; "nothing else" is measured from the settings that most of the runs share.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cliquetta.report.runs import ReportedRun, flat_settings, most_common, varied
from cliquetta.report.style import BASELINE_LOOK, line_look, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPONENTS = ("modalities", "retention")
_NOT_A_SETTING = frozenset({"seed", "model"})


@dataclass(frozen=True)
class Point:
    """The runs at one value of a setting."""

    value: Any
    top1: tuple[float, ...]
    """Over seeds."""
    clique_size: float | None = None
    """Mean over batches of the largest clique's size, where the runs kept counts."""

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.mean(self.top1)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for one."""
        return statistics.stdev(self.top1) if len(self.top1) > 1 else 0.0


@dataclass(frozen=True)
class Curve:
    """One setting varied, everything else as most runs have it."""

    setting: str
    method: str
    dataset: str
    points: tuple[Point, ...]
    default: Any
    """The value that most runs have."""
    baseline: float | None
    """Top-1 of zero-shot on the same data, mean over seeds."""

    @property
    def numeric(self) -> bool:
        """Whether the values lie on an axis."""
        return all(
            isinstance(point.value, int | float) and not isinstance(point.value, bool)
            for point in self.points
        )


def find_curves(runs: Sequence[ReportedRun]) -> list[Curve]:
    """All curves that can be drawn from ``runs``, one per dataset, method and setting."""
    scored = [run for run in runs if run.metric("top1") is not None]
    groups: dict[tuple[str, str, str], list[ReportedRun]] = {}
    for run in scored:
        model = str(run.record.settings["model"]["id"])
        groups.setdefault((run.record.dataset, run.record.method, model), []).append(run)
    found = []
    for (dataset, method, model), members in groups.items():
        zero = [run.metric("top1") or 0.0 for run in groups.get((dataset, "zero_shot", model), [])]
        baseline = statistics.mean(zero) if zero and method != "zero_shot" else None
        settings = [flat_settings(run.record) for run in members]
        keys = [key for key in varied(settings) if key not in _NOT_A_SETTING]
        common = {key: most_common([each.get(key) for each in settings]) for key in keys}
        if all(key in keys for key in COMPONENTS):
            points = _component_points(members, settings, common)
            found.append(Curve("components", method, dataset, points, None, baseline))
        for key in keys:
            if key in COMPONENTS and "components" in {curve.setting for curve in found}:
                continue
            others = [other for other in keys if other != key]
            own = [
                (each.get(key), run)
                for run, each in zip(members, settings, strict=True)
                if all(each.get(other) == common[other] for other in others)
            ]
            points = _points(own)
            if len(points) > 1:
                found.append(Curve(key, method, dataset, points, common[key], baseline))
    return [curve for curve in found if len(curve.points) > 1]


def _points(own: Sequence[tuple[Any, ReportedRun]]) -> tuple[Point, ...]:
    by_value: dict[str, list[tuple[Any, ReportedRun]]] = {}
    for value, run in own:
        by_value.setdefault(repr(value), []).append((value, run))
    points = []
    for members in by_value.values():
        sizes = [_clique_size(run) for _, run in members]
        known = [size for size in sizes if size is not None]
        points.append(
            Point(
                members[0][0],
                tuple(run.metric("top1") or 0.0 for _, run in members),
                statistics.mean(known) if known else None,
            )
        )
    try:
        return tuple(sorted(points, key=lambda point: point.value))
    except TypeError:
        return tuple(points)


def _component_points(
    members: Sequence[ReportedRun],
    settings: Sequence[dict[str, Any]],
    common: dict[str, Any],
) -> tuple[Point, ...]:
    """What is learned, with and without retention, everything else alike."""
    others = [key for key in common if key not in COMPONENTS]
    own = [
        ((not each["retention"], each["modalities"]), run)
        for run, each in zip(members, settings, strict=True)
        if all(each.get(other) == common[other] for other in others)
    ]
    words = {"image": "image", "text": "text", "both": "image + text"}
    order = list(words)
    points = sorted(
        _points(own), key=lambda point: (not point.value[0], order.index(point.value[1]))
    )
    return tuple(
        Point(
            words[point.value[1]] + ("" if point.value[0] else " + retention"),
            point.top1,
            point.clique_size,
        )
        for point in points
    )


def _clique_size(run: ReportedRun) -> float | None:
    """Mean over batches of the largest clique's size."""
    if run.evidence is None:
        return None
    sizes = [count["max_size"] for count in run.evidence.counts if "max_size" in count]
    return statistics.mean(sizes) if sizes else None


def curve_figure(curve: Curve) -> Figure:
    """Points joined where the setting is a number, rows of dots where it is a choice."""
    if not curve.numeric:
        return _choices(curve)
    sizes = [point.clique_size for point in curve.points]
    wide = curve.setting == "batch_size" and all(size is not None for size in sizes)
    with new_figure(6.8 if wide else 3.9, 2.9) as figure:
        axes = figure.subplots(1, 2 if wide else 1, squeeze=False)[0]
        values = [point.value for point in curve.points]
        look = line_look(0)
        axes[0].errorbar(
            values,
            [point.mean for point in curve.points],
            [point.spread for point in curve.points] if _several(curve) else None,
            capsize=3,
            elinewidth=1.2,
            **look,
        )
        _baseline(axes[0], curve)
        _axis(axes[0], curve, values)
        axes[0].set_ylabel("top-1, %")
        if wide:
            axes[1].plot(values, sizes, **line_look(1))
            axes[1].set_ylabel("largest clique, images")
            axes[1].set_ylim(bottom=0)
            _axis(axes[1], curve, values)
    return figure


def _several(curve: Curve) -> bool:
    return any(len(point.top1) > 1 for point in curve.points)


def _baseline(axes: Axes, curve: Curve) -> None:
    if curve.baseline is None:
        return
    look = {key: value for key, value in BASELINE_LOOK.items() if key != "marker"}
    axes.axhline(curve.baseline, label="zero_shot", **look)
    axes.legend(loc="best")


def _axis(axes: Axes, curve: Curve, values: Sequence[float]) -> None:
    """The values that were run as ticks; evenly spaced on a logarithm where they multiply."""
    axes.set_xlabel(curve.setting.replace("_", " "))
    if min(values) > 0 and max(values) / min(values) >= 16:
        axes.set_xscale("log", base=2 if curve.setting == "batch_size" else 10)
    shown = values if len(values) <= 9 else values[:: -(-len(values) // 9)]
    axes.set_xticks(shown, [f"{value:g}" for value in shown])
    axes.minorticks_off()


def _choices(curve: Curve) -> Figure:
    """Dots in rows: the scale need not begin at 0, as that of bars would have to."""
    with new_figure(5.6, 1.0 + 0.36 * len(curve.points)) as figure:
        axes = figure.subplots()
        for place, point in enumerate(curve.points):
            look = line_look(place) | {"linestyle": "none", "markersize": 7}
            error = point.spread if _several(curve) else None
            axes.errorbar(point.mean, place, xerr=error, capsize=3, elinewidth=1.2, **look)
            axes.annotate(
                f"{point.mean:.1f}",
                (point.mean, place),
                (0, 6),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=8,
            )
        if curve.baseline is not None:
            look = {key: value for key, value in BASELINE_LOOK.items() if key != "marker"}
            axes.axvline(curve.baseline, label=f"zero_shot {curve.baseline:.1f}", **look)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
        axes.margins(x=0.12)
        axes.set_yticks(range(len(curve.points)), [str(point.value) for point in curve.points])
        axes.set_ylim(len(curve.points) - 0.5, -0.7)
        axes.set_xlabel("top-1, %")
        if curve.setting != "components":
            axes.set_ylabel(curve.setting.replace("_", " "))
    return figure
