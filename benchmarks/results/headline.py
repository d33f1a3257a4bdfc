"""The headline table: ImageNet, ImageNet-C and the shifts of the real tower, by method."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.results import COMMAND
from benchmarks.results.headline_figure import Bars, headline_figure
from benchmarks.results.imagenet_page import (
    CLEAN,
    corruption_columns,
    on_all_images,
    own_rows,
)
from benchmarks.results.leaderboard import BoardRow, board_rows
from benchmarks.results.texts import BLANK, method_of
from cliquetta.decimals import signed
from cliquetta.errors import UserError
from cliquetta.evaluation.comparison import Overall
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.tables import TextTable, to_markdown
from cliquetta.methods.building.registry import DEFAULT_METHOD

COSTS = "speed-h200-methods_speed.json"
"""Time of methods beside encoding, each alone on the machine (``benchmarks.methods_speed``)."""
RIVALS = 4
SHOWN = ("scap",)
"""Methods that the table has wherever they stand, also with images missing."""
SHIFTS = ("noise", "blur", "weather", "digital", "sketch and art")
"""Columns of the board whose sets are shifts of the images alone."""


@dataclass(frozen=True)
class OnTower:
    """Gains of one method over the shifts of the real tower's board."""

    gain: float
    worst: float
    sets: int
    asked: int
    """sets that any method was run on"""

    @property
    def complete(self) -> bool:
        """Whether no set is missing."""
        return self.sets == self.asked


@dataclass(frozen=True)
class HeadlineRow:
    """One method on the three kinds of images."""

    method: str
    clean: Overall
    corrupted: Overall
    on_tower: OnTower | None


@dataclass(frozen=True)
class Headline:
    """What the table and the picture show."""

    kinds: tuple[str, str, str]
    rows: tuple[HeadlineRow, ...]


def read_headline(
    imagenet: Sequence[Record], tower: Sequence[Record], roles: Mapping[str, str]
) -> Headline:
    """Read off the records what the headline shows, zero-shot first, then by ImageNet-C.

    Args:
        imagenet: Records of the ImageNet board.
        tower: Records of the real tower's board.
        roles: Kinds of the data sets that are a shift themselves, by id.

    """
    table, columns = on_all_images(imagenet)
    if CLEAN not in columns:
        raise UserError(
            "the headline needs runs on all clean images of ImageNet: record them with "
            f"`{COMMAND} leaderboard --run --grid leaderboard-imagenet`"
        )
    corruptions = corruption_columns(columns)
    on_tower = tower_gains(board_rows(tower, roles))
    overall = [table.overall(name, corruptions) for name in own_rows(table)]
    rows = []
    for row in chosen_rows(overall):
        method = method_of(row.row)
        clean = table.overall(row.row, [columns[CLEAN]])
        rows.append(
            HeadlineRow(
                method=method,
                clean=clean,
                corrupted=row,
                on_tower=on_tower.get(method),
            )
        )
    shifts = max((one.asked for one in on_tower.values()), default=0)
    kinds = ("ImageNet", "ImageNet-C", f"{shifts} shifts, few classes")
    return Headline(kinds=kinds, rows=tuple(rows))


def headline_table(headline: Headline, costs: Mapping[str, float]) -> str:
    """Write the table: zero-shot, the default, the best rivals on ImageNet-C, and SCAP."""
    lines = [_line(row, costs) for row in headline.rows]
    head = ("method", *headline.kinds, "worst", "cost alone")
    return to_markdown(TextTable(head, tuple(lines))).rstrip()


def headline_picture(headline: Headline) -> str:
    """Draw the gains of the table's methods, where they have all images of a kind."""
    bars = []
    for row in headline.rows:
        if row.method == BASELINE:
            continue
        corrupted = row.corrupted.gain if row.corrupted.complete else None
        on_tower = None
        if row.on_tower is not None and row.on_tower.complete:
            on_tower = row.on_tower.gain
        gains = (row.clean.gain, corrupted, on_tower)
        if any(gain is not None for gain in gains):
            bars.append(Bars(row.method, gains))
    return headline_figure(headline.kinds, bars)


def tower_gains(rows: Mapping[str, BoardRow]) -> dict[str, OnTower]:
    """Average the gains of every method over the shifted sets of a board.

    Of several settings of a method the one with most sets counts.
    """
    gains: dict[str, dict[str, float]] = {}
    for label, row in rows.items():
        by_set = {}
        for column in SHIFTS:
            for cell in row.measured(column):
                by_set[cell.column] = cell.gain or 0.0
        method = method_of(label)
        if len(by_set) > len(gains.get(method, {})):
            gains[method] = by_set

    every_set = {name for by_set in gains.values() for name in by_set}
    return {
        method: OnTower(
            gain=fmean(by_set.values()),
            worst=min(by_set.values()),
            sets=len(by_set),
            asked=len(every_set),
        )
        for method, by_set in gains.items()
    }


def _line(row: HeadlineRow, costs: Mapping[str, float]) -> tuple[str, ...]:
    """Write the cells of one method."""
    # The worst of all shifts, on whichever tower.
    lowest = []
    if row.corrupted.worst is not None:
        gain, _ = row.corrupted.worst
        lowest.append(gain)
    if row.on_tower is not None:
        lowest.append(row.on_tower.worst)
    return (
        f"`{row.method}`",
        _accuracy(row.clean),
        _accuracy(row.corrupted),
        _gain_on_tower(row.on_tower),
        signed(min(lowest), 1) if lowest else BLANK,
        _cost(row.method, costs),
    )


def _cost(method: str, costs: Mapping[str, float]) -> str:
    """Write the cost of a method: at first, and in the long run where that differs."""
    if method == BASELINE:
        return "1.0 ×"
    cost = costs.get(method)
    if cost is None:
        return BLANK
    young = costs.get(f"{method}:young")
    if young is None:
        return f"{cost:.1f} ×"
    return f"{young:.1f} ×, later {cost:.1f} ×"


def chosen_rows(rows: Sequence[Overall]) -> list[Overall]:
    """Choose the rows of the table: zero-shot, then by mean; incomplete ones last."""
    by_method: dict[str, Overall] = {}
    for row in rows:
        method = method_of(row.row)
        if row.complete or method in SHOWN:
            by_method[method] = row

    def rank(name: str) -> tuple[bool, float]:
        return not by_method[name].complete, -(by_method[name].mean or 0.0)

    # The best rivals join those that are always shown.
    ranked = sorted(by_method, key=rank)
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


def _accuracy(row: Overall) -> str:
    """Write accuracy with its gain over zero-shot; the gain alone where images are missing."""
    if row.mean is None:
        return BLANK
    if row.gain is None:
        return f"{row.mean:.1f}"
    if not row.complete:
        return f"{signed(row.gain, 1)} ({row.datasets})"
    return f"{row.mean:.1f} ({signed(row.gain, 1)})"


def _gain_on_tower(row: OnTower | None) -> str:
    """Write the gain on the real tower's shifts, and on how many where some are missing."""
    if row is None:
        return BLANK
    text = signed(row.gain, 1)
    return text if row.complete else f"{text} ({row.sets} of {row.asked})"
