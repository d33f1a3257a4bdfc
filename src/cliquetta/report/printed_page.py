"""The figures that papers print for ImageNet beside our own, as a section of Markdown.

What is printed, and where, is data (``docs/results/printed-imagenet.json``); ours are records of
the grid ``published-imagenet``, with the numbers of images that a method repairs and breaks.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.tables import TextTable, signed, to_markdown
from cliquetta.report import results_pages as pages

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
    printed: float | None  # top-1; ``None`` where no figure for ImageNet alone was found
    baseline: float | None  # zero-shot's in the same table; ``None`` for zero-shot itself
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
        printed, own = self.printed, self.own
        if printed.gain is not None and own.gain is not None and own.gain_error:
            return (own.gain - printed.gain) / own.gain_error
        if printed.method == BASELINE and printed.printed is not None:
            return (own.accuracy - printed.printed) / own.accuracy_error
        return None


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
    if "repaired" not in record.metrics:
        return Own(images, accuracy, accuracy_error, gain=None, gain_error=None)
    repaired = int(record.metrics["repaired"])
    broken = int(record.metrics["broken"])
    mean = (repaired - broken) / images
    variance = (repaired + broken) / images - mean**2
    return Own(
        images=images,
        accuracy=accuracy,
        accuracy_error=accuracy_error,
        gain=100 * mean,
        gain_error=100 * math.sqrt(variance / images),
    )


def match(printed: Sequence[Printed], records: Iterable[Record]) -> list[Row]:
    """Pair every printed figure with our runs of its method and its kind of text."""
    known = list(records)
    rows = []
    for entry in printed:
        runs = [r for r in known if r.method == entry.method and text_of(r) == entry.text]
        # zero-shot is run beside every block of the grid
        by_dataset = {run.dataset: run for run in reversed(runs) if not _limited(run)}
        if not by_dataset:
            by_dataset = {run.dataset: run for run in runs}
        if entry.method == BASELINE:
            by_dataset = dict(sorted(by_dataset.items(), key=lambda item: -item[1].images)[:1])
        rows += [Row(entry, dataset, measure(run)) for dataset, run in by_dataset.items()]
    return rows


def _limited(run: Record) -> bool:
    return run.settings["stream"]["limit"] is not None


def printed_section(printed: Sequence[Printed], records: Sequence[Record]) -> str:
    """Write the section: the table, then a sentence for every difference."""
    rows = match(printed, records)
    head = ("method", "texts", "views", "printed", "its gain", "images", "ours", "our gain", "off")
    lines = []
    for row in rows:
        entry, own = row.printed, row.own
        small = " (256 px)" if "-256" in row.dataset else ""
        lines.append(
            (
                entry.name,
                entry.text,
                entry.views,
                pages.shown(entry.printed, ".2f"),
                pages.shown(entry.gain, "+.2f"),
                f"{own.images:,}{small}",
                f"{own.accuracy:.2f} ± {own.accuracy_error:.2f}",
                _with_error(own.gain, own.gain_error),
                _far(row.distance),
            )
        )
    if not lines:
        return "**Not recorded yet**: `cliquetta reproduce published --run --root DIR`."
    parts = [to_markdown(TextTable(head, tuple(lines), labels=2)).rstrip()]
    notes = [pages.as_item(f"{e.name}: {_sentence(e)}") for e in printed]
    parts += ["Sources, and what differs:", "\n".join(notes)]
    parts += [recorded_line(records)]
    return "\n\n".join(parts)


def recorded_line(records: Sequence[Record]) -> str:
    """Say when and on what our figures were recorded."""
    days = sorted({record.finished[:10] for record in records})
    machines = sorted({str(record.environment["device_name"]) for record in records})
    versions = sorted({str(record.environment["versions"]["torch"]) for record in records})
    period = " to ".join(dict.fromkeys([days[0], days[-1]]))
    where = f"{', '.join(machines)}, torch {', '.join(versions)}"
    return pages.fill(f"Recorded {period} on {where}: {len(records)} runs, seed 0.")


def _with_error(value: float | None, error: float | None) -> str:
    if value is None or error is None:
        return pages.BLANK
    return f"{signed(value)} ± {error:.2f}"


def _far(distance: float | None) -> str:
    """A distance in standard errors, bold where it has to be explained."""
    if distance is None:
        return pages.BLANK
    text = f"{signed(distance, 1)}"
    return f"**{text}**" if abs(distance) > FAR else text


def _sentence(entry: Printed) -> str:
    source = entry.source.rstrip(".")
    return f"{source}. {entry.why}".strip()


def insert_between(page: str, name: str, command: str, text: str) -> str:
    """Put a text between the two marks of its name on a page."""
    begin = f"<!-- {name}: cliquetta reproduce {command} -->"
    end = f"<!-- /{name} -->"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page needs a line {begin!r} and a line {end!r}")
    return f"{before}{begin}\n{text}\n{end}{after}"
