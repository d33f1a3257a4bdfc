"""Who wins where: methods by kinds of stream, with advice that is read off the figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cliquetta.data.corruptions import CORRUPTIONS
from cliquetta.data.shifts import parse_dataset_id
from cliquetta.evaluation.comparison import compare
from cliquetta.evaluation.record import Record, Run
from cliquetta.evaluation.sweep import BASELINE
from cliquetta.evaluation.tables import TextTable, to_markdown
from cliquetta.report.results_pages import (
    BLANK,
    as_item,
    fill,
    method_of,
    read_settings,
    short_id,
    sources,
    times,
)

COLUMNS = {
    "clean": ("clean", "top1"),
    "noise": ("noise", "top1"),
    "blur": ("blur", "top1"),
    "weather": ("weather", "top1"),
    "digital": ("digital", "top1"),
    "sketch and art": ("rendering", "top1"),
    "few classes": ("few classes", "top1"),
    "bursts": ("bursts", "top1"),
    "long tail (F1)": ("long tail", "macro_f1"),
    "open set": ("open set", "top1"),
    "open set (AUROC)": ("open set", "auroc"),
    "mixed": ("mixed", "top1"),
    "batch 1": ("batch 1", "top1"),
}
"""Columns of the board: a kind of stream, as :func:`stream_kind` tells it, and a metric."""
ORDERS = {
    "keff": "few classes",
    "uneven": "few classes",
    "correlated": "bursts",
    "separate": "bursts",
    "long-tail": "long tail",
    "mixed": "mixed",
}
CHEAP = 1.5
"""Times the cost of zero-shot up to which a method is called cheap."""
READING = (
    "A cell is the gain over zero-shot in points, mean over the sets of its column and over "
    "seeds, on exactly the same images; in brackets the set with the lowest gain. ▼ marks a loss, "
    "bold the highest gain of a column. The row of zero-shot holds its own figures. Rows are "
    "ordered by their mean over columns.",
    "*Long tail* is macro-F1, *open set* accuracy on images of the class list, *AUROC* how well "
    "the highest probability tells them from the others; all else is top-1 accuracy.",
    "*Cost* is time per image as a multiple of zero-shot's, the median over sets. Methods that "
    "saw fewer *images* per run than others are left out of the advice and of bold.",
)


def stream_kind(record: Record) -> str:
    """What is special about the stream of a record: its protocol, else the shift of its images."""
    stream, order = record.settings["stream"], Run(record, None).order
    if "unknown" in stream:
        return "open set"
    if order in ORDERS:
        return ORDERS[order]
    if stream["batch_size"] == 1:
        return "batch 1"
    shift = parse_dataset_id(record.dataset)[1]
    return "clean" if shift is None else CORRUPTIONS[shift.name].group


@dataclass
class _Row:
    """A method, as far as it was run."""

    gains: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """By column: the gain, and on which set."""
    levels: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)
    """By column and set: on how many images, and the metric itself; the most images count."""
    costs: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def gain(self, column: str) -> float | None:
        found = [gain for gain, _ in self.gains.get(column, ())]
        return statistics.mean(found) if found else None

    @property
    def cost(self) -> float | None:
        return statistics.median(self.costs) if self.costs else None

    @property
    def images(self) -> int:
        """Of a run, usually."""
        return round(statistics.median(self.sizes))


def leaderboard_page(records: Sequence[Record], folder: Path) -> str:
    """The board as Markdown; ``folder`` holds the pages of methods."""
    parts = [
        "# Who wins where",
        fill(
            "Written by `cliquetta reproduce leaderboard` from the records in `docs/results`: do "
            "not edit it. Every method that needs no labelled images, on the bundled model."
        ),
    ]
    if not records:
        parts += [
            fill(
                "**Not recorded yet.** `cliquetta reproduce leaderboard --run --device cuda` runs "
                "the grid and writes this page; `--shard I/N` shares it out over processes."
            )
        ]
        return "\n\n".join(parts) + "\n"
    rows = _rows(records)
    advice = [as_item(f"**{column}**: {_advice(rows, column)}") for column in COLUMNS]
    parts += ["\n".join(map(as_item, READING)), _board(rows, folder)]
    parts += ["## What to take for which stream", "\n".join(advice)]
    parts += ["## Sources", sources(read_settings(records, {}))]
    return "\n\n".join(parts) + "\n"


def _rows(records: Iterable[Record]) -> dict[str, _Row]:
    """Every method by its label; zero-shot first, then by the mean over columns."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(stream_kind(record), []).append(record)
    rows: dict[str, _Row] = {}
    for column, (kind, metric) in COLUMNS.items():
        for setting in read_settings(kinds.get(kind, []), {}):
            table = compare(setting.runs, metric=metric)
            for (name, dataset), cell in table.cells.items():
                row = rows.setdefault(name, _Row())
                images = cell.runs[0].record.images
                row.sizes.append(images)
                row.costs += [] if cell.cost is None else [cell.cost]
                if cell.gain is not None:
                    row.gains.setdefault(column, []).append((cell.gain, short_id(dataset)))
                if cell.mean is not None:
                    known = row.levels.setdefault(column, {})
                    known[dataset] = max(known.get(dataset, (0, 0.0)), (images, cell.mean))

    def rank(name: str) -> tuple[bool, float]:
        gains = [gain for column in COLUMNS if (gain := rows[name].gain(column)) is not None]
        return name != BASELINE, -statistics.mean(gains) if gains else 0.0

    return {name: rows[name] for name in sorted(rows, key=rank)}


def _ranked(rows: dict[str, _Row], column: str) -> list[tuple[str, float]]:
    """Methods with the gain of a column, best first, of those that saw as many images as any."""
    others = {name: row for name, row in rows.items() if row.gains}
    most = max((row.images for row in others.values()), default=0)
    found = [(name, row.gain(column)) for name, row in others.items() if row.images == most]
    known = [(name, gain) for name, gain in found if gain is not None]
    return sorted(known, key=lambda pair: -pair[1])


def _board(rows: dict[str, _Row], folder: Path) -> str:
    best = {column: [name for name, _ in _ranked(rows, column)[:1]] for column in COLUMNS}
    lines = []
    for name, row in rows.items():
        page = folder / f"{method_of(name)}.md"
        link = f"[`{name}`](../methods/{page.name})" if page.exists() else f"`{name}`"
        cells = [_cell(row, column, bold=name in best[column]) for column in COLUMNS]
        cost = BLANK if row.cost is None else times(row.cost)
        lines.append((link, *cells, cost, f"{row.images:,}"))
    head = ("method", *COLUMNS, "cost", "images")
    return to_markdown(TextTable(head, tuple(lines))).rstrip()


def _cell(row: _Row, column: str, *, bold: bool) -> str:
    gain = row.gain(column)
    if gain is None:
        levels = [level for _, level in row.levels.get(column, {}).values()]
        return f"{statistics.mean(levels):.1f}" if levels else BLANK
    shown = _points(gain)
    shown = f"**{shown}**" if bold and gain > 0 else shown
    lowest, name = min(row.gains[column])
    return shown if len(row.gains[column]) == 1 else f"{shown} ({name} {_points(lowest)})"


def _points(gain: float) -> str:
    rounded = round(gain, 1) + 0.0
    return f"{'▼' if rounded < 0 else ''}{rounded:+.1f}"


def _advice(rows: dict[str, _Row], column: str) -> str:
    """Up to three sentences: the highest gains, who never loses, what little time buys."""
    ranked = _ranked(rows, column)
    if not ranked:
        return "Nothing is recorded."
    if ranked[0][1] <= 0:
        return "No method gains: take zero-shot."
    shown = [f"`{name}` ({gain:+.1f})" for name, gain in ranked[:3] if gain > 0]
    sentences = [f"Highest gains: {', '.join(shown)}."]
    safe = [name for name, gain in ranked if gain > 0 and min(rows[name].gains[column])[0] >= 0]
    if safe:
        more = f" and {len(safe) - 3} more" if len(safe) > 3 else ""
        named = ", ".join(f"`{name}`" for name in safe[:3])
        sentences.append(f"Below zero-shot on no set: {named}{more}.")
    else:
        name = max((n for n, gain in ranked if gain > 0), key=lambda n: min(rows[n].gains[column]))
        lowest, where = min(rows[name].gains[column])
        sentences.append(
            f"Every method loses somewhere; of those that gain, `{name}` least ({lowest:+.1f} on "
            f"{where})."
        )
    cheap = [(n, g) for n, g in ranked if g > 0 and (rows[n].cost or CHEAP + 1) <= CHEAP]
    if cheap and cheap[0][0] != ranked[0][0]:
        name, gain = cheap[0]
        sentences.append(f"For at most {CHEAP:g} × the time of zero-shot: `{name}` ({gain:+.1f}).")
    return " ".join(sentences)
