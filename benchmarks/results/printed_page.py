"""The figures that papers print for ImageNet beside our own, as a section of Markdown.

What is printed, and where, is data (``docs/results/printed-imagenet.json``); ours are
records of the grid ``published-imagenet``, with the numbers of images that a method
repairs and breaks.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import COMMAND
from benchmarks.results.texts import BLANK, as_item, figure, recorded_line
from cliquetta.decimals import signed
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.tables import TextTable, to_markdown

PRINTED = "printed-imagenet.json"
SINGLE = "single"
DESCRIPTIONS = "descriptions"
FAR = 2.0
"""Standard errors from which on a difference has to be explained."""


@dataclass(frozen=True)
class Printed:
    """A figure of a paper, and with which of our runs it is compared."""

    method: str
    name: str
    text: str  # which of our text tables is nearest to the paper's
    printed: float | None
    """top-1; ``None`` where no figure for ImageNet alone was found"""
    baseline: float | None
    """zero-shot's in the same table; ``None`` for zero-shot itself"""
    views: str
    source: str
    why: str  # the reason of a difference, or what differs in the set-up

    @property
    def gain(self) -> float | None:
        """The paper's gain over its own zero-shot."""
        if self.printed is None or self.baseline is None:
            return None
        return self.printed - self.baseline


@dataclass(frozen=True)
class Own:
    """Our run: accuracy and gain in percent and points, with their standard errors."""

    images: int
    accuracy: float
    accuracy_error: float
    gain: float | None
    gain_error: float | None


@dataclass(frozen=True)
class Row:
    """A printed figure and one of our runs."""

    printed: Printed
    dataset: str
    own: Own

    @property
    def distance(self) -> float | None:
        """How far our gain (or zero-shot's accuracy) is from the paper's, in standard errors.

        The error is ours alone: papers average over 50,000 images.
        """
        printed = self.printed
        own = self.own
        if printed.method == BASELINE and printed.printed is not None:
            return (own.accuracy - printed.printed) / own.accuracy_error
        if printed.gain is None or own.gain is None or not own.gain_error:
            return None
        return (own.gain - printed.gain) / own.gain_error


def read_printed(path: Path) -> list[Printed]:
    """Read the printed figures."""
    return [Printed(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def text_of(record: Record) -> str:
    """Tell which text table a run had."""
    (template,) = record.settings["prompts"]["templates"]
    return DESCRIPTIONS if "descriptions" in template else SINGLE


def measure(record: Record) -> Own:
    """Read accuracy and gain of a run with their standard errors."""
    images = record.images
    accuracy = float(record.metrics["top1"])
    share = accuracy / 100
    accuracy_error = 100 * math.sqrt(share * (1 - share) / images)

    # The gain is a mean of differences: 1 where an image is repaired, -1 where it is
    # broken.
    gain = None
    gain_error = None
    if "repaired" in record.metrics:
        repaired = int(record.metrics["repaired"])
        broken = int(record.metrics["broken"])
        mean = (repaired - broken) / images
        mean_square = (repaired + broken) / images
        variance = mean_square - mean**2
        gain = 100 * mean
        gain_error = 100 * math.sqrt(variance / images)
    return Own(
        images=images,
        accuracy=accuracy,
        accuracy_error=accuracy_error,
        gain=gain,
        gain_error=gain_error,
    )


def match(printed: Sequence[Printed], records: Iterable[Record]) -> list[Row]:
    """Pair every printed figure with our runs of its method and its kind of text."""
    runs = list(records)
    rows = []
    for entry in printed:
        for dataset, run in _runs_of(entry, runs).items():
            rows.append(Row(entry, dataset, measure(run)))
    return rows


def _runs_of(entry: Printed, records: Sequence[Record]) -> dict[str, Record]:
    """Find our runs by dataset: those over all images, where there are such."""
    runs = []
    for record in records:
        if record.method == entry.method and text_of(record) == entry.text:
            runs.append(record)

    # Runs over some of the images count where there are none over all.
    whole = [run for run in runs if run.settings["stream"]["limit"] is None]
    by_dataset: dict[str, Record] = {}
    for run in whole or runs:
        # Zero-shot was run beside every block of the grid.
        by_dataset.setdefault(run.dataset, run)
    if entry.method != BASELINE:
        return by_dataset
    # Zero-shot has one row, the dataset with most images.
    most = max(by_dataset.values(), key=lambda run: run.images, default=None)
    return {} if most is None else {most.dataset: most}


def printed_section(printed: Sequence[Printed], records: Sequence[Record]) -> str:
    """Write the section: the table, then a sentence for every method."""
    rows = match(printed, records)
    if not rows:
        return f"**Not recorded yet**: `{COMMAND} published --run --root DIR`."
    head = (
        "method",
        "texts",
        "views",
        "printed",
        "its gain",
        "images",
        "ours",
        "our gain",
        "off",
    )
    lines = tuple(_line(row) for row in rows)
    table = to_markdown(TextTable(head, lines, labels=2)).rstrip()
    notes = []
    for entry in printed:
        notes.append(as_item(f"{entry.name}: {_sentence(entry)}"))
    parts = [
        table,
        "Sources, and what differs:",
        "\n".join(notes),
        recorded_line(records),
    ]
    return "\n\n".join(parts)


def _line(row: Row) -> tuple[str, ...]:
    """Write the cells of one row."""
    entry = row.printed
    own = row.own
    images = f"{own.images:,}"
    if "-256" in row.dataset:
        images += " (256 px)"
    return (
        entry.name,
        entry.text,
        entry.views,
        figure(entry.printed, ".2f"),
        figure(entry.gain, "+.2f"),
        images,
        f"{own.accuracy:.2f} ± {own.accuracy_error:.2f}",
        _with_error(own.gain, own.gain_error),
        _far(row.distance),
    )


def _with_error(value: float | None, error: float | None) -> str:
    if value is None or error is None:
        return BLANK
    return f"{signed(value)} ± {error:.2f}"


def _far(distance: float | None) -> str:
    """Write a distance in standard errors, bold where it has to be explained."""
    if distance is None:
        return BLANK
    text = signed(distance, 1)
    if abs(distance) > FAR:
        return f"**{text}**"
    return text


def _sentence(entry: Printed) -> str:
    source = entry.source.rstrip(".")
    return f"{source}. {entry.why}".strip()
