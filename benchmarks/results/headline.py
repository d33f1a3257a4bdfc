"""The headline table: ImageNet, ImageNet-C and the shifts of the real tower, by method."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import results_pages as pages
from benchmarks.results.headline_figure import Bars, headline_figure
from benchmarks.results.imagenet_page import (
    CLEAN,
    corruption_columns,
    on_all_images,
    own_rows,
)
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
    real: Sequence[pages.Setting],
    costs: Mapping[str, float],
) -> str:
    """Write the table: zero-shot, the default, the best rivals on ImageNet-C, and SCAP."""
    lines = []
    for row in headline_rows(imagenet, real):
        lines.append(_line(row.clean, row.corrupted, row.on_tower, costs))
    head = ("method", *kinds_of_images(real), "worst", "cost alone")
    return to_markdown(TextTable(head, tuple(lines))).rstrip()


def headline_picture(imagenet: Sequence[Record], real: Sequence[pages.Setting]) -> str:
    """Draw the gains of the table's methods."""
    bars = []
    for row in headline_rows(imagenet, real):
        on_tower = None if row.on_tower is None else row.on_tower.gain
        gains = (row.clean.gain, row.corrupted.gain, on_tower)
        if row.method != BASELINE:
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
    imagenet: Sequence[Record], real: Sequence[pages.Setting]
) -> list[HeadlineRow]:
    """The methods of the headline, zero-shot first, then by mean over the corruptions."""
    table, columns = on_all_images(imagenet)
    corruptions = corruption_columns(columns)
    tower = real[0] if real else None
    overall = [table.overall(name, corruptions) for name in own_rows(table)]
    rows = []
    for row in chosen_rows(overall):
        method = pages.method_of(row.row)
        rows.append(
            HeadlineRow(
                method=method,
                clean=table.overall(row.row, [columns[CLEAN]]),
                corrupted=row,
                on_tower=_on_tower(tower, method),
            )
        )
    return rows


def kinds_of_images(real: Sequence[pages.Setting]) -> tuple[str, ...]:
    """Name the kinds of images."""
    shifts = len(real[0].columns(pages.REPORT)) if real else 0
    return "ImageNet", "ImageNet-C, mean", f"{shifts} shifts, few classes"


def _line(
    clean: Overall,
    corrupted: Overall,
    on_tower: Overall | None,
    costs: Mapping[str, float],
) -> tuple[str, ...]:
    """Write the cells of one method."""
    method = pages.method_of(corrupted.row)
    lowest = []
    if corrupted.worst is not None:
        lowest.append(corrupted.worst[0])
    if on_tower is not None and on_tower.worst is not None:
        lowest.append(on_tower.worst[0])
    cost = costs.get(method)
    if method == BASELINE:
        cost = 1.0
    return (
        f"`{method}`",
        _accuracy(clean),
        _accuracy(corrupted),
        _accuracy(on_tower),
        pages.shown(min(lowest, default=None), "+.1f"),
        pages.BLANK if cost is None else f"{cost:.1f} ×",
    )


def chosen_rows(rows: Sequence[Overall]) -> list[Overall]:
    """Choose the rows of the table: zero-shot, then by mean."""
    by_method = {}
    for row in rows:
        if row.complete:
            by_method[pages.method_of(row.row)] = row
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


def _on_tower(setting: pages.Setting | None, method: str) -> Overall | None:
    """A method over the shifts of the real tower's grid on which nothing was chosen."""
    if setting is None:
        return None
    for row in setting.table.rows:
        if pages.method_of(row) == method:
            return setting.table.overall(row, setting.columns(pages.REPORT))
    return None


def _accuracy(row: Overall | None) -> str:
    """Accuracy, with its gain over zero-shot."""
    if row is None:
        return pages.BLANK
    text = pages.shown(row.mean, ".1f")
    if row.gain is None:
        return text
    return f"{text} ({row.gain:+.1f})"
