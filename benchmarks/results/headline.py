"""The headline table: ImageNet, ImageNet-C and the shifts of the real tower, by method."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results.headline_figure import Bars, headline_figure
from benchmarks.results.imagenet_page import (
    CLEAN,
    corruption_columns,
    on_all_images,
    own_rows,
)
from benchmarks.results.settings import CLEAN as CLEAN_ROLE
from benchmarks.results.settings import DEVELOPMENT, REPORT, Setting
from benchmarks.results.texts import BLANK, figure, method_of, times
from cliquetta.decimals import signed
from cliquetta.evaluation.comparison import Overall
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.tables import TextTable, to_markdown
from cliquetta.methods.registry import DEFAULT_METHOD

COSTS = "speed-h200-methods_speed.json"
"""Time of methods beside encoding, each alone on the machine (``benchmarks.methods_speed``)."""
RIVALS = 4
SHOWN = ("scap",)
"""Methods that the table has wherever they stand."""


def headline_table(
    imagenet: Sequence[Record],
    real: Sequence[Setting],
    costs: Mapping[str, float],
) -> str:
    """Write the table: zero-shot, the default, the best rivals on ImageNet-C, and SCAP."""
    rows = headline_rows(imagenet, real)
    lines = [_line(row, costs) for row in rows]
    head = ("method", *kinds_of_images(real), "worst", "cost alone")
    return to_markdown(TextTable(head, tuple(lines))).rstrip()


def headline_picture(imagenet: Sequence[Record], real: Sequence[Setting]) -> str:
    """Draw the gains of the table's methods."""
    bars = []
    for row in headline_rows(imagenet, real):
        if row.method == BASELINE:
            continue
        on_tower = None if row.on_tower is None else row.on_tower.gain
        gains = (row.clean.gain, row.corrupted.gain, on_tower)
        bars.append(Bars(method=row.method, gains=gains))
    return headline_figure(kinds_of_images(real), bars)


@dataclass(frozen=True)
class HeadlineRow:
    """One method on the three kinds of images."""

    method: str
    clean: Overall
    corrupted: Overall
    on_tower: Overall | None


def headline_rows(
    imagenet: Sequence[Record], real: Sequence[Setting]
) -> list[HeadlineRow]:
    """Choose the methods of the headline, zero-shot first, then by mean over the corruptions."""
    table, columns = on_all_images(imagenet)
    corruptions = corruption_columns(columns)
    tower = real[0] if real else None
    overall = [table.overall(name, corruptions) for name in own_rows(table)]
    rows = []
    for row in chosen_rows(overall):
        method = method_of(row.row)
        rows.append(
            HeadlineRow(
                method=method,
                clean=table.overall(row.row, [columns[CLEAN]]),
                corrupted=row,
                on_tower=_on_tower(tower, method),
            )
        )
    return rows


def kinds_of_images(real: Sequence[Setting]) -> tuple[str, ...]:
    """Name the kinds of images."""
    shifts = len(real[0].columns(REPORT)) if real else 0
    return "ImageNet", "ImageNet-C, mean", f"{shifts} shifts, few classes"


def _line(row: HeadlineRow, costs: Mapping[str, float]) -> tuple[str, ...]:
    """Write the cells of one method."""
    # The worst of all shifts, on whichever tower.
    lowest = []
    for shifted in (row.corrupted, row.on_tower):
        if shifted is not None and shifted.worst is not None:
            gain, _ = shifted.worst
            lowest.append(gain)
    cost = 1.0 if row.method == BASELINE else costs.get(row.method)
    return (
        f"`{row.method}`",
        _accuracy(row.clean),
        _accuracy(row.corrupted),
        _accuracy(row.on_tower),
        figure(min(lowest, default=None), "+.1f"),
        BLANK if cost is None else f"{cost:.1f} ×",
    )


def chosen_rows(rows: Sequence[Overall]) -> list[Overall]:
    """Choose the rows of the table: zero-shot, then by mean."""
    by_method = {}
    for row in rows:
        if row.complete:
            by_method[method_of(row.row)] = row
    ranked = sorted(
        by_method,
        key=lambda name: by_method[name].mean or 0.0,
        reverse=True,
    )

    # The best rivals join those that are always shown.
    fixed = (DEFAULT_METHOD, *SHOWN)
    rivals = [name for name in ranked if name not in (BASELINE, *fixed)]
    wanted = {*fixed, *rivals[:RIVALS]}

    chosen = []
    if BASELINE in by_method:
        chosen.append(by_method[BASELINE])
    for name in ranked:
        if name in wanted:
            chosen.append(by_method[name])
    return chosen


def read_costs(results: Path) -> dict[str, float]:
    """Read how much longer a batch takes than encoding it, by method."""
    rows = json.loads((results / COSTS).read_text(encoding="utf-8"))["rows"]
    return {str(row["method"]): float(row["x encoding"]) for row in rows}


def _on_tower(setting: Setting | None, method: str) -> Overall | None:
    """Summarise a method over the real tower's shifts on which nothing was chosen."""
    if setting is None:
        return None
    for row in setting.table.rows:
        if method_of(row) == method:
            return setting.table.overall(row, setting.columns(REPORT))
    return None


def _accuracy(row: Overall | None) -> str:
    """Write accuracy, with its gain over zero-shot."""
    if row is None:
        return BLANK
    text = figure(row.mean, ".1f")
    if row.gain is None:
        return text
    return f"{text} ({row.gain:+.1f})"


def bundled_headline(bundled: Sequence[Setting], real: Sequence[Setting]) -> str:
    """Write the table as long as ImageNet is not recorded.

    It has a row per method of the first setting of each; of ``real`` only what is not
    ``dev``.
    """
    sides = []
    for setting in bundled[:1]:
        sides.append(_Side("bundled set", setting, (REPORT, DEVELOPMENT)))
    for setting in real[:1]:
        sides.append(_Side("real tower", setting, (REPORT,)))
    head = ["method"]
    for side in sides:
        head += [f"{side.name}, {len(side.columns)} shifts", "worst", "clean"]
    lines = []
    for row in sides[-1].setting.rows:
        method = method_of(row.row)
        if not all(method in side.labels for side in sides):
            continue
        line = [f"`{method}`"]
        for side in sides:
            line += side.cells(method)
        lines.append((*line, times(row.cost)))
    return to_markdown(TextTable((*head, "cost"), tuple(lines))).rstrip()


@dataclass(frozen=True)
class _Side:
    """One model's columns of the table without ImageNet."""

    name: str
    setting: Setting
    roles: tuple[str, ...]

    @property
    def columns(self) -> list[str]:
        """The shifts that the means are over."""
        return self.setting.columns(*self.roles)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the rows by method; options may differ from one side to the other."""
        rows = self.setting.table.rows
        return {method_of(row): row for row in reversed(rows)}

    def cells(self, method: str) -> list[str]:
        """Write accuracy with its gain, the worst shift, and what is left of clean images."""
        label = self.labels[method]
        table = self.setting.table
        row = table.overall(label, self.columns)
        clean = table.overall(label, self.setting.columns(CLEAN_ROLE))
        if row.gain is None or row.worst is None:
            return [f"{row.mean:.2f}", BLANK, figure(clean.mean, ".1f")]
        lowest, _ = row.worst
        return [
            f"{row.mean:.2f} ({signed(row.gain)})",
            signed(lowest),
            figure(clean.gain, "+.1f"),
        ]
