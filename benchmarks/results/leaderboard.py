"""The leaderboard: methods by kinds of stream, with advice that is read off the figures."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import COMMAND
from benchmarks.results import results_pages as pages
from cliquetta.data.corruptions import CORRUPTIONS, parse_dataset_id
from cliquetta.decimals import signed
from cliquetta.evaluation.comparison import Cell, average, compare, grouped
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record, Run
from cliquetta.evaluation.tables import TextTable, to_markdown
from cliquetta.methods.registry import DEFAULT_METHOD, get_method

BOARDS = {
    "leaderboard": "Bundled model",
    "leaderboard-real": "Real ViT-B/16 image tower, fixed text features",
    "leaderboard-imagenet": "ImageNet, 1,000 classes: the same tower, fixed text features",
}
"""Titles of the boards, by the grid that each is recorded from."""
COLUMNS = {
    "clean": ("clean", "top1"),
    "noise": ("noise", "top1"),
    "blur": ("blur", "top1"),
    "weather": ("weather", "top1"),
    "digital": ("digital", "top1"),
    "sketch and art": ("rendering", "top1"),
    "hub class": ("hub", "top1"),
    "few classes": ("few classes", "top1"),
    "bursts": ("bursts", "top1"),
    "long tail (F1)": ("long tail", "macro_f1"),
    "open set": ("open set", "top1"),
    "open set (AUROC)": ("open set", "auroc"),
    "mixed": ("mixed", "top1"),
    "there and back": ("there and back", "top1"),
    "batch 8": ("batch 8", "top1"),
    "batch 1": ("batch 1", "top1"),
}
"""Columns of the board: a kind of stream, as :func:`stream_kind` tells it, and a metric."""
SINGLE = "batch 1"  # the column of streams of single images
Runs = Mapping[tuple[str, int], float]  # gains by set and seed
ORDERS = {
    "keff": "few classes",
    "uneven": "few classes",
    "correlated": "bursts",
    "separate": "bursts",
    "long-tail": "long tail",
    "mixed": "mixed",
    "recurring": "there and back",
}
SMALL_BATCHES = {1: "batch 1", 8: "batch 8"}
CHEAP = 1.5  # times the cost of zero-shot up to which a method is called cheap
NAMED = 3  # methods that a sentence names; of others it tells the number
READING = (
    "A cell is the gain over zero-shot in points, mean over the sets of its column and over "
    "seeds, on exactly the same images; in brackets the set with the lowest gain. ▼ marks a loss, "
    "bold the highest gain of a column. The row of zero-shot holds its own figures. Rows are "
    "ordered by their mean over columns; those that lack columns, or saw less of one, stand behind "
    "the others, because their means are of other data.",
    "*Hub class*: all classes occur alike, but the shift makes most images look like one of them. "
    "*Long tail* is macro-F1, *open set* accuracy on images of the class list, *AUROC* how well "
    "the highest probability tells them from the others; all else is top-1 accuracy.",
    "*Cost* is time per image as a multiple of zero-shot's, the median over sets, among many runs "
    "that shared a GPU; methods alone are [faster](README.md). *Sets × images* tells how much a "
    "method was shown: slow ones saw fewer images, or fewer sets. In columns where a method saw "
    "less than others (its cell is marked °) it is left out of advice and bold.",
    "*Setting* is the preset, or what a method's defaults are its authors' setting for. *For "
    "batches*: the method compares the images of a batch, and single images are not what it is "
    "for.",
    "*Within noise* of another: the mean difference of the two over sets and seeds is below twice "
    "its standard error.",
)


def stream_kind(record: Record, roles: Mapping[str, str]) -> str:
    """The kind of stream of a record: its protocol, else the shift of its images.

    ``roles`` has the kind of datasets that are a shift themselves, by id; others are
    clean.
    """
    stream, order = record.settings["stream"], Run(record, None).order
    if "unknown" in stream:
        return "open set"
    if order in ORDERS:
        return ORDERS[order]
    if stream["batch_size"] in SMALL_BATCHES:
        return SMALL_BATCHES[stream["batch_size"]]
    shift = parse_dataset_id(record.dataset)[1]
    if shift is not None:
        return CORRUPTIONS[shift.name].group
    role = roles.get(record.dataset, pages.CLEAN)
    return role if role in {kind for kind, _ in COLUMNS.values()} else pages.CLEAN


@dataclass
class BoardRow:
    """A method, as far as it was run."""

    cells: dict[str, list[Cell]] = field(
        default_factory=dict
    )  # the sets of every column

    def measured(self, column: str) -> list[Cell]:
        """The sets of a column with a gain."""
        return [cell for cell in self.cells.get(column, ()) if cell.gains]

    def gain(self, column: str) -> float | None:
        """The mean over the sets of a column."""
        return average(cell.gain for cell in self.measured(column))

    def worst(self, column: str) -> tuple[float, str]:
        """The lowest gain among the sets of a column, and the set."""
        cells = self.measured(column)
        return min((cell.gain or 0.0, pages.short_id(cell.column)) for cell in cells)

    def runs(self, column: str) -> Runs:
        """Gains by set and seed."""
        return {
            (c.column, seed): g
            for c in self.measured(column)
            for seed, g in c.gains.items()
        }

    @property
    def cost(self) -> float | None:
        """Time per image as a multiple of zero-shot's, usually."""
        costs = (cell.cost for cells in self.cells.values() for cell in cells)
        return average(costs, statistics.median)

    @property
    def size(self) -> str:
        """Sets and images of a run, usually."""
        counted = [cells for c, cells in self.cells.items() if COLUMNS[c][1] != "auroc"]
        sizes = [_images(cell) for cells in counted for cell in cells]
        return f"{len(sizes)} × {round(statistics.median(sizes)):,}"


def leaderboard_page(
    boards: Mapping[str, tuple[Sequence[Record], Mapping[str, BoardRow]]], folder: Path
) -> str:
    """The boards as Markdown: by title, records and rows; ``folder`` holds the methods' pages."""
    about = (
        f"Written by `{COMMAND} leaderboard` from the records in `docs/results`: do "
        "not edit it. Every registered method that needs no labelled images; where text "
        "features are fixed, every one that needs no text tower."
    )
    parts = [
        "# Who wins where",
        pages.fill(about),
        "\n".join(map(pages.as_item, READING)),
    ]
    for title, (records, rows) in boards.items():
        parts += [f"## {title}", *_sections(records, rows, folder)]
    return "\n\n".join(parts) + "\n"


def _sections(
    records: Sequence[Record], rows: Mapping[str, BoardRow], folder: Path
) -> list[str]:
    if not records:
        command = f"`{COMMAND} leaderboard --run --device cuda` runs the grid"
        shares = "and writes this page; `--shard I/N` shares it out over processes."
        return [pages.fill(f"**Not recorded yet.** {command} {shares}")]
    columns = recorded_columns(rows)
    advice = [
        pages.as_item(f"**{column}**: {_advice(rows, column)}") for column in columns
    ]
    return [
        _board(rows, folder),
        "### What to take for which stream",
        "\n".join(advice),
        f"### `{DEFAULT_METHOD}`, the default, column by column",
        _standing(rows, DEFAULT_METHOD),
        "### Sources",
        pages.sources(pages.read_settings(records, {})),
    ]


def board_rows(
    records: Iterable[Record], roles: Mapping[str, str]
) -> dict[str, BoardRow]:
    """Every method by its label; zero-shot first, then by the mean over columns."""
    kinds = grouped(records, lambda record: stream_kind(record, roles))
    rows: dict[str, BoardRow] = {}
    for column, (kind, metric) in COLUMNS.items():
        for setting in pages.read_settings(kinds.get(kind, []), {}):
            for (name, _), cell in compare(setting.runs, metric=metric).cells.items():
                if cell.mean is not None and not (
                    column == SINGLE and for_batches(name)
                ):
                    rows.setdefault(name, BoardRow()).cells.setdefault(
                        column, []
                    ).append(cell)

    whole = _everywhere(rows)

    def rank(name: str) -> tuple[bool, bool, float]:
        mean = average(map(rows[name].gain, COLUMNS)) or 0.0
        return name != BASELINE, name not in whole, -mean

    return {name: rows[name] for name in sorted(rows, key=rank)}


def _everywhere(rows: Mapping[str, BoardRow]) -> set[str]:
    """Methods that saw of every column as much as any: their means are of the same data."""
    names = set(rows)
    for column in recorded_columns(rows):
        full = set(_in_full(rows, column))
        if column == SINGLE:
            full |= {name for name in rows if for_batches(name)}
        names &= full
    return names


def recorded_columns(rows: Mapping[str, BoardRow]) -> list[str]:
    """The columns of which anything is recorded."""
    return [c for c in COLUMNS if any(row.cells.get(c) for row in rows.values())]


def for_batches(label: str) -> bool:
    """Whether single images are not what a method is for."""
    return get_method(pages.method_of(label)).for_batches


def _setting(label: str) -> str:
    """The setting of a method: a preset, or what its defaults are its authors' setting for."""
    preset = re.search(r":([\w.-]+)", label)
    return (
        preset[1]
        if preset
        else get_method(pages.method_of(label)).setting or pages.BLANK
    )


def method_sentence(rows: Mapping[str, BoardRow], method: str) -> str:
    """Say where a method gains over zero-shot and loses; empty if it is not on the board."""
    label = next(
        (label for label in rows if pages.method_of(label) == method), BASELINE
    )
    gains = (
        {c: gain for c in COLUMNS if (gain := rows[label].gain(c)) is not None}
        if rows
        else {}
    )
    up = sorted((c for c in gains if gains[c] > 0), key=lambda c: -gains[c])
    down = sorted((c for c in gains if gains[c] <= 0), key=lambda c: gains[c])
    sentences = [
        f"{what} on {', '.join(f'{c} ({_points(gains[c])})' for c in columns)}"
        for what, columns in (("gains over zero-shot", up), ("does not", down))
        if columns
    ]
    return f"`{label}` {' and '.join(sentences)}." if sentences else ""


def _images(cell: Cell) -> int:
    return cell.runs[0].record.images


def _in_full(rows: Mapping[str, BoardRow], column: str) -> list[str]:
    """Methods that saw of a column as much as the default method, or as any, best first."""
    sizes: dict[str, int] = {}
    for name, row in rows.items():
        by_set = {cell.column: _images(cell) for cell in row.measured(column)}
        if by_set:
            sizes[name] = sum(by_set.values())
    # The default method is run on all of a column; some may have been shown other
    # images as well.
    usual = max(sizes.values(), default=0)
    for name, size in sizes.items():
        if pages.method_of(name) == DEFAULT_METHOD:
            usual = size
    full = [name for name, size in sizes.items() if size >= usual]
    return sorted(full, key=lambda name: -(rows[name].gain(column) or 0.0))


def _board(rows: Mapping[str, BoardRow], folder: Path) -> str:
    recorded = recorded_columns(rows)
    full = {column: _in_full(rows, column) for column in recorded}
    lines = []
    for name, row in rows.items():
        cells = [_cell(row, column, name, full[column]) for column in recorded]
        head = (pages.linked(name, folder, "../methods/"), _setting(name))
        lines.append((*head, *cells, pages.times(row.cost), row.size))
    columns = ("method", "setting", *recorded, "cost", "sets × images")
    return to_markdown(TextTable(columns, tuple(lines))).rstrip()


def _cell(row: BoardRow, column: str, name: str, full: Sequence[str]) -> str:
    gain = row.gain(column)
    if column == SINGLE and for_batches(name):
        return "for batches"
    if (
        gain is None
    ):  # zero-shot may have been run on fewer images as well: the most count
        most = {
            cell.column: cell for cell in sorted(row.cells.get(column, ()), key=_images)
        }
        return pages.shown(average(cell.mean for cell in most.values()), ".1f")
    points = _points(gain) + ("" if name in full else "°")
    points = f"**{points}**" if full[:1] == [name] and gain > 0 else points
    lowest, where = row.worst(column)
    return (
        points
        if len(row.measured(column)) == 1
        else f"{points} ({where} {_points(lowest)})"
    )


def _points(gain: float) -> str:
    rounded = round(gain, 1) + 0.0
    return f"{'▼' if rounded < 0 else ''}{rounded:+.1f}"


def within_noise(better: Runs, other: Runs) -> bool:
    """Whether two methods differ by less than twice the standard error, run by run."""
    steps = [better[run] - other[run] for run in better if run in other]
    if len(steps) < 2:
        return False
    return statistics.mean(steps) < 2 * statistics.stdev(steps) / math.sqrt(len(steps))


def _advice(rows: Mapping[str, BoardRow], column: str) -> str:
    """Three sentences: the best and who is as good; who loses, and who never; what is cheap."""
    full = _in_full(rows, column)
    gains = {name: rows[name].gain(column) or 0.0 for name in full}
    if not full:
        return "Nothing is recorded."
    if gains[full[0]] <= 0:
        lost = _some(gains, [name for name in full[::-1] if gains[name] < 0])
        return f"No method gains: take zero-shot. The most is lost by: {lost}."
    best = rows[full[0]].runs(column)
    alike = [name for name in full[1:] if within_noise(best, rows[name].runs(column))]
    first = f"Highest gain: {_some(gains, full[:1])}"
    losing = [name for name in full[::-1] if gains[name] < 0]
    safe = [name for name in full if rows[name].worst(column)[0] >= 0]
    sentences = [
        f"{first}; within noise of it: {_some(gains, alike)}.",
        f"Below zero-shot on average: {_some(gains, losing)}; on no set: {_some(gains, safe)}.",
    ]
    cheap = [
        name
        for name in full
        if (rows[name].cost or CHEAP + 1) <= CHEAP and gains[name] > 0
    ]
    cost = rows[full[0]].cost
    paid = (
        f"`{full[0]}` takes {pages.times(cost)} the time of zero-shot" if cost else ""
    )
    if cheap[:1] != full[:1]:
        paid += f"; for at most {CHEAP:g} ×: {_some(gains, cheap[:1])}"
    return " ".join([*sentences, f"{paid}." if paid else ""]).rstrip()


def _some(gains: Mapping[str, float], names: Sequence[str]) -> str:
    first = ", ".join(f"`{name}` ({signed(gains[name], 1)})" for name in names[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{first}{more}" if names else "none"


def _standing(rows: Mapping[str, BoardRow], name: str) -> str:
    """The gain and the rank of one method, and how far the best of each column is from it."""
    name = next((label for label in rows if label.split()[0] == name), name)
    lines = []
    for column in COLUMNS:
        full = _in_full(rows, column)
        if name in full:
            own, best = (
                rows[name].gain(column) or 0.0,
                rows[full[0]].gain(column) or 0.0,
            )
            lowest, where = rows[name].worst(column)
            rank = f"{full.index(name) + 1} of {len(full)}"
            behind = (
                pages.BLANK
                if full[0] == name
                else f"{_points(own - best)} (`{full[0]}`)"
            )
            lines.append(
                (column, _points(own), f"{_points(lowest)} ({where})", rank, behind)
            )
    head = ("column", "gain", "lowest gain", "rank", "against the best")
    return (
        to_markdown(TextTable(head, tuple(lines))).rstrip()
        if lines
        else "Not recorded."
    )
