"""The leaderboard: methods by kinds of stream, with advice that is read off the figures."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import COMMAND, texts
from benchmarks.results.methods_page import sources
from benchmarks.results.settings import CLEAN, read_settings
from cliquetta.data.corruptions import CORRUPTIONS, parse_dataset_id
from cliquetta.decimals import signed
from cliquetta.evaluation.comparison import Cell, average, compare, grouped
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record, Run
from cliquetta.evaluation.tables import TextTable, to_markdown
from cliquetta.methods.building.registry import DEFAULT_METHOD, get_method

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
    """Name the kind of stream of a record: its protocol, else the shift of its images.

    ``roles`` has the kind of datasets that are a shift themselves, by id; others are
    clean.
    """
    stream = record.settings["stream"]
    order = Run(record, None).order
    if "unknown" in stream:
        return "open set"
    if order in ORDERS:
        return ORDERS[order]
    if stream["batch_size"] in SMALL_BATCHES:
        return SMALL_BATCHES[stream["batch_size"]]
    _, shift = parse_dataset_id(record.dataset)
    if shift is not None:
        return CORRUPTIONS[shift.name].group
    kinds = {kind for kind, _ in COLUMNS.values()}
    role = roles.get(record.dataset, CLEAN)
    return role if role in kinds else CLEAN


@dataclass
class BoardRow:
    """A method, as far as it was run."""

    cells: dict[str, list[Cell]] = field(default_factory=dict)
    """the sets of every column"""

    def measured(self, column: str) -> list[Cell]:
        """Return the sets of a column with a gain."""
        return [cell for cell in self.cells.get(column, ()) if cell.gains]

    def gain(self, column: str) -> float | None:
        """Average over the sets of a column."""
        return average(cell.gain for cell in self.measured(column))

    def worst(self, column: str) -> tuple[float, str]:
        """Return the lowest gain among the sets of a column, and the set."""
        gains = []
        for cell in self.measured(column):
            gains.append((cell.gain or 0.0, texts.short_id(cell.column)))
        return min(gains)

    def runs(self, column: str) -> Runs:
        """Return gains by set and seed."""
        gains = {}
        for cell in self.measured(column):
            for seed, gain in cell.gains.items():
                gains[cell.column, seed] = gain
        return gains

    @property
    def cost(self) -> float | None:
        """Time per image as a multiple of zero-shot's, usually."""
        costs = (cell.cost for cells in self.cells.values() for cell in cells)
        return average(costs, statistics.median)

    @property
    def size(self) -> str:
        """Sets and images of a run, usually."""
        sizes = []
        for column, cells in self.cells.items():
            _, metric = COLUMNS[column]
            if metric != "auroc":  # of the streams of another column
                sizes += [_images(cell) for cell in cells]
        usual = round(statistics.median(sizes))
        return f"{len(sizes)} × {usual:,}"


def leaderboard_page(
    boards: Mapping[str, tuple[Sequence[Record], Mapping[str, BoardRow]]], folder: Path
) -> str:
    """Write the boards by title, of records and rows; ``folder`` holds the methods' pages."""
    about = (
        f"Written by `{COMMAND} leaderboard` from the records in `docs/results`: do "
        "not edit it. Every registered method that needs no labelled images; where text "
        "features are fixed, every one that needs no text tower."
    )
    parts = [
        "# Who wins where",
        texts.fill(about),
        "\n".join(map(texts.as_item, READING)),
    ]
    for title, (records, rows) in boards.items():
        parts += [f"## {title}", *_sections(records, rows, folder)]
    return "\n\n".join(parts) + "\n"


def _sections(
    records: Sequence[Record], rows: Mapping[str, BoardRow], folder: Path
) -> list[str]:
    """Write the sections of one board: its table, advice, the default method, sources."""
    if not records:
        words = (
            f"**Not recorded yet.** `{COMMAND} leaderboard --run --device cuda` runs the "
            "grid and writes this page; `--shard I/N` shares it out over processes."
        )
        return [texts.fill(words)]
    advice = []
    for column in recorded_columns(rows):
        advice.append(texts.as_item(f"**{column}**: {_advice(rows, column)}"))
    return [
        _board(rows, folder),
        "### What to take for which stream",
        "\n".join(advice),
        f"### `{DEFAULT_METHOD}`, the default, column by column",
        _standing(rows, DEFAULT_METHOD),
        "### Sources",
        sources(read_settings(records, {})),
    ]


def board_rows(
    records: Iterable[Record], roles: Mapping[str, str]
) -> dict[str, BoardRow]:
    """Read every method by its label; zero-shot first, then by the mean over columns."""
    kinds = grouped(records, lambda record: stream_kind(record, roles))
    rows: dict[str, BoardRow] = {}
    for column, (kind, metric) in COLUMNS.items():
        for setting in read_settings(kinds.get(kind, []), {}):
            for (name, _), cell in compare(setting.runs, metric=metric).cells.items():
                unsuited = column == SINGLE and for_batches(name)
                if cell.mean is not None and not unsuited:
                    row = rows.setdefault(name, BoardRow())
                    row.cells.setdefault(column, []).append(cell)

    # Means over other data than most are in no order.
    comparable = _everywhere(rows)

    def rank(name: str) -> tuple[bool, bool, float]:
        mean = average(map(rows[name].gain, COLUMNS)) or 0.0
        return name != BASELINE, name not in comparable, -mean

    return {name: rows[name] for name in sorted(rows, key=rank)}


def _everywhere(rows: Mapping[str, BoardRow]) -> set[str]:
    """Name methods that saw of every column as much as any: their means are of the same data."""
    names = set(rows)
    for column in recorded_columns(rows):
        full = set(_in_full(rows, column))
        if column == SINGLE:
            full |= {name for name in rows if for_batches(name)}
        names &= full
    return names


def recorded_columns(rows: Mapping[str, BoardRow]) -> list[str]:
    """Return the columns of which anything is recorded."""
    return [c for c in COLUMNS if any(row.cells.get(c) for row in rows.values())]


def for_batches(label: str) -> bool:
    """Return whether single images are not what a method is for."""
    return get_method(texts.method_of(label)).for_batches


def _setting(label: str) -> str:
    """Name the setting of a method: a preset, or what its defaults are its authors' setting for."""
    preset = re.search(r":([\w.-]+)", label)
    if preset:
        return preset[1]
    return get_method(texts.method_of(label)).setting or texts.BLANK


def method_sentence(rows: Mapping[str, BoardRow], method: str) -> str:
    """Say where a method gains over zero-shot and loses; empty if it is not on the board."""
    labels = [label for label in rows if texts.method_of(label) == method]
    if not labels:
        return ""

    row = rows[labels[0]]
    gains = {}
    for column in COLUMNS:
        gain = row.gain(column)
        if gain is not None:
            gains[column] = gain

    def on(columns: Sequence[str]) -> str:
        return ", ".join(f"{column} ({_points(gains[column])})" for column in columns)

    # Largest gains first, then largest losses.
    by_gain = sorted(gains, key=lambda column: gains[column])
    losses = [column for column in by_gain if gains[column] <= 0]
    best_first = sorted(gains, key=lambda column: -gains[column])
    wins = [column for column in best_first if gains[column] > 0]
    sentences = []
    if wins:
        sentences.append(f"gains over zero-shot on {on(wins)}")
    if losses:
        sentences.append(f"does not on {on(losses)}")
    return f"`{labels[0]}` {' and '.join(sentences)}." if sentences else ""


def _images(cell: Cell) -> int:
    return cell.runs[0].record.images


def _in_full(rows: Mapping[str, BoardRow], column: str) -> list[str]:
    """Rank the methods that saw of a column as much as the default method, or as any."""
    sizes: dict[str, int] = {}
    for name, row in rows.items():
        by_set = {cell.column: _images(cell) for cell in row.measured(column)}
        if by_set:
            sizes[name] = sum(by_set.values())

    # The default method is run on all of a column; some may have been shown other
    # images as well.
    usual = max(sizes.values(), default=0)
    for name, size in sizes.items():
        if texts.method_of(name) == DEFAULT_METHOD:
            usual = size
    full = [name for name, size in sizes.items() if size >= usual]
    return sorted(full, key=lambda name: -(rows[name].gain(column) or 0.0))


def _board(rows: Mapping[str, BoardRow], folder: Path) -> str:
    """Write the table of all methods by columns."""
    recorded = recorded_columns(rows)
    full = {column: _in_full(rows, column) for column in recorded}
    lines = []
    for name, row in rows.items():
        line = (
            texts.linked(name, folder, "../methods/"),
            _setting(name),
            *(_cell(row, column, name, full[column]) for column in recorded),
            texts.times(row.cost),
            row.size,
        )
        lines.append(line)
    columns = ("method", "setting", *recorded, "cost", "sets × images")
    return to_markdown(TextTable(columns, tuple(lines))).rstrip()


def _cell(row: BoardRow, column: str, name: str, full: Sequence[str]) -> str:
    """Write a gain with its signs and the set with the lowest; zero-shot's own accuracy."""
    if column == SINGLE and for_batches(name):
        return "for batches"
    gain = row.gain(column)
    if gain is None:
        # Zero-shot may have been run on fewer images as well: the most count.
        by_set = {}
        for cell in sorted(row.cells.get(column, ()), key=_images):
            by_set[cell.column] = cell.mean
        return texts.figure(average(by_set.values()), ".1f")
    points = _points(gain)
    if name not in full:
        points += "°"
    if full[:1] == [name] and gain > 0:
        points = f"**{points}**"
    if len(row.measured(column)) == 1:
        return points
    lowest, where = row.worst(column)
    return f"{points} ({where} {_points(lowest)})"


def _points(gain: float) -> str:
    """Write a gain in points, a loss with a triangle."""
    rounded = round(gain, 1) + 0.0
    sign = "▼" if rounded < 0 else ""
    return f"{sign}{rounded:+.1f}"


def within_noise(better: Runs, other: Runs) -> bool:
    """Return whether two methods differ by less than twice the standard error, run by run."""
    differences = [better[run] - other[run] for run in better if run in other]
    if len(differences) < 2:
        return False
    mean = statistics.mean(differences)
    deviation = statistics.stdev(differences)
    return mean < 2 * deviation / math.sqrt(len(differences))


def _advice(rows: Mapping[str, BoardRow], column: str) -> str:
    """Write who is best and who as good, who loses and who never, and what is cheap."""
    full = _in_full(rows, column)
    if not full:
        return "Nothing is recorded."
    gains = {name: rows[name].gain(column) or 0.0 for name in full}
    losing = [name for name in reversed(full) if gains[name] < 0]
    best = full[0]
    if gains[best] <= 0:
        lost = _some(gains, losing)
        return f"No method gains: take zero-shot. The most is lost by: {lost}."

    best_runs = rows[best].runs(column)
    alike = []
    for name in full[1:]:
        if within_noise(best_runs, rows[name].runs(column)):
            alike.append(name)

    safe = []
    cheap = []
    for name in full:
        lowest, _ = rows[name].worst(column)
        if lowest >= 0:
            safe.append(name)
        cost = rows[name].cost
        if cost and cost <= CHEAP and gains[name] > 0:
            cheap.append(name)

    sentences = [
        f"Highest gain: {_some(gains, [best])}; within noise of it: {_some(gains, alike)}.",
        f"Below zero-shot on average: {_some(gains, losing)}; on no set: {_some(gains, safe)}.",
    ]

    paid = ""
    if rows[best].cost:
        paid = f"`{best}` takes {texts.times(rows[best].cost)} the time of zero-shot"
    if cheap[:1] != [best]:
        paid += f"; for at most {CHEAP:g} ×: {_some(gains, cheap[:1])}"
    if paid:
        sentences.append(f"{paid}.")
    return " ".join(sentences)


def _some(gains: Mapping[str, float], names: Sequence[str]) -> str:
    """Name a few methods with their gains, and how many more there are."""
    if not names:
        return "none"
    listed = [f"`{name}` ({signed(gains[name], 1)})" for name in names[:NAMED]]
    text = ", ".join(listed)
    if len(names) > NAMED:
        text += f" and {len(names) - NAMED} more"
    return text


def _standing(rows: Mapping[str, BoardRow], name: str) -> str:
    """Write the gain and the rank of one method, and how far the best of each column is from it."""
    # The label has the preset behind the name.
    name = next((label for label in rows if label.split()[0] == name), name)
    lines = []
    for column in COLUMNS:
        full = _in_full(rows, column)
        if name not in full:
            continue
        gain = rows[name].gain(column) or 0.0
        lowest, where = rows[name].worst(column)
        best = full[0]
        behind = texts.BLANK
        if best != name:
            highest = rows[best].gain(column) or 0.0
            behind = f"{_points(gain - highest)} (`{best}`)"
        line = (
            column,
            _points(gain),
            f"{_points(lowest)} ({where})",
            f"{full.index(name) + 1} of {len(full)}",
            behind,
        )
        lines.append(line)
    if not lines:
        return "Not recorded."
    head = ("column", "gain", "lowest gain", "rank", "against the best")
    return to_markdown(TextTable(head, tuple(lines))).rstrip()
