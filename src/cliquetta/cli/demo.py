"""``cliquetta demo``: adaptation on the bundled model and images, in a few minutes on a CPU."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.cli.command import Common, command
from cliquetta.cli.console import Terminal, count, number
from cliquetta.cli.executing import finish, run_grid
from cliquetta.cli.options import BatchSize, split_list
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.predictions import Predictions
    from cliquetta.evaluation.record import Record
    from cliquetta.report.changes import Changes

PLAIN = "zero_shot"
CLEAN = "clean"
"""The name of no shift at all."""
SHIFTS = ("gaussian_noise:3", "defocus_blur:3", "contrast:3", "jpeg_compression:3", CLEAN)
"""The development shifts, a fixed list that no test gain has chosen, and images as they are."""
_EXAMPLES = """
cliquetta demo

cliquetta demo --shifts fog:4,contrast:3 --images 128 --method scap,domain_norm

cliquetta demo --method zero_shot
"""


@dataclass(frozen=True)
class Comparison:
    """The runs on one stream, zero-shot first, with their predictions."""

    shift: str
    """Of what the stream consists, as the table says it."""
    records: tuple[Record, ...]
    answers: tuple[Predictions, ...]

    @property
    def batch_size(self) -> int:
        """Images per batch."""
        return int(self.records[0].settings["stream"]["batch_size"])

    @property
    def changes(self) -> Mapping[str, Changes]:
        """How the predictions of each method differ from those of zero-shot."""
        return _changes([self])


def _changes(comparisons: Sequence[Comparison]) -> dict[str, Changes]:
    """Over all shifts, by method."""
    from cliquetta.report.changes import count_changes

    methods = [record.method for record in comparisons[0].records]
    return {
        method: count_changes([(c.answers[0], c.answers[place]) for c in comparisons])
        for place, method in enumerate(methods)
        if place
    }


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(app, "demo", examples=_EXAMPLES)(demo)


def demo(
    common: Common,
    method: Annotated[
        str, typer.Option(help="Methods to show beside zero_shot, comma-separated.")
    ] = "domain_norm,tda",
    shifts: Annotated[
        str, typer.Option(help="Shifts as NAME:SEVERITY or clean, comma-separated.")
    ] = ",".join(SHIFTS),
    images: Annotated[int, typer.Option(min=1, max=2000, help="Images per shift.")] = 320,
    singles: Annotated[
        int, typer.Option(min=0, max=2000, help="Images that come one at a time; 0 for none.")
    ] = 256,
    scap: Annotated[
        int, typer.Option(min=0, max=2000, help="Images for SCAP as printed; 0 for none.")
    ] = 32,
    batch_size: BatchSize = 64,
    seed: Annotated[int, typer.Option(help="Seed of the order and of the method.")] = 0,
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("demo"),
) -> None:
    """Classify shifted images with plain CLIP and with adapting methods, side by side.

    Model and images are bundled: a small CLIP trained on CIFAR images, and a slice of CIFAR-10's
    test set that it never saw, with corruptions that it never saw either. On the first shift,
    images also come one at a time to the first method, and SCAP as its paper prints it is shown on
    some of them. The report is about the streams in batches.
    """
    from cliquetta.evaluation.grid import RunSpec, grid, with_method
    from cliquetta.evaluation.predictions import load_predictions
    from cliquetta.evaluation.sweep import RunContext

    methods, wanted = read_methods(method), split_list(shifts, "shifts")
    base = RunSpec("", PLAIN, batch_size=batch_size, limit=images, dtype=common.dtype)
    parts = [(shift, shift, base, methods) for shift in wanted]
    if singles and methods:
        one = replace(base, batch_size=1, limit=singles)
        parts.append((f"{wanted[0]}, one at a time", wanted[0], one, methods[:1]))
    if scap and methods and "scap" not in methods:
        parts.append((wanted[0], wanted[0], replace(base, limit=scap), ["scap"]))
    grids = []
    for _, shift, spec, names in parts:
        cells = [spec, *(with_method(spec, name) for name in names)]
        grids.append(grid(cells, datasets=[_dataset(shift)], seeds=[seed]))
    specs = [spec for cells in grids for spec in cells]
    context = RunContext(out, device=common.place(), evidence=True)
    results = run_grid(specs, context, common.terminal)
    found = {result.spec: result.record for result in results if result.record is not None}
    if all(spec in found for spec in specs):
        comparisons = []
        for (label, *_), cells in zip(parts, grids, strict=True):
            records = tuple(found[spec] for spec in cells)
            answers = tuple(load_predictions(out / record.id) for record in records)
            comparisons.append(Comparison(label, records, answers))
        _report(comparisons, out, _make_page(comparisons[: len(wanted)], out), common.terminal)
    finish(results, common.terminal)


def _dataset(shift: str) -> str:
    return "bundled" if shift == CLEAN else f"bundled@{shift}"


def read_methods(given: str) -> list[str]:
    """The methods of ``a,b,c`` but zero-shot, which is always run."""
    from cliquetta.methods.registry import get_method

    named = Counter(part.strip() for part in given.split(","))
    names = [get_method(name).name for name in split_list(given, "methods")]
    twice = [name for name in names if named[name] > 1]
    if twice:
        raise UserError(f"--method names {twice[0]} twice: name every method once")
    return [name for name in names if name != PLAIN]


def _make_page(comparisons: Sequence[Comparison], out: Path) -> Path | None:
    """The report of all runs, where matplotlib is installed."""
    from cliquetta.report.style import can_draw

    if not can_draw():
        return None
    from cliquetta.report.files import write_page
    from cliquetta.report.page import Choices, build_page
    from cliquetta.report.runs import load_runs

    folders = [out / record.id for c in comparisons for record in c.records]
    path = out / "report.html"
    write_page(build_page(*load_runs(folders), Choices(title="CliqueTTA demo")), path)
    return path


def summary(changes: Mapping[str, Changes], plain_right: int) -> list[str]:
    """What the methods did to the predictions, in words: all in one line, then each."""
    from cliquetta.report.changes import in_words

    images = next(iter(changes.values())).images
    before = 100 * plain_right / images
    shares = [f"{PLAIN} gets {number(before)} % right"]
    shares += [f"{name} {number(before + (c.gain or 0.0))} %" for name, c in changes.items()]
    first = f"{', '.join(shares[:-1])} and {shares[-1]}"
    lines = [in_words(change, method) for method, change in changes.items()]
    return [f"Of {count(images, 'shifted image')}, {first}.", *lines]


def _report(
    comparisons: Sequence[Comparison], out: Path, page: Path | None, terminal: Terminal
) -> None:
    for group in _groups(comparisons):
        changes = _changes(group)
        columns = table_columns(list(changes))
        terminal.table(columns, [_row(c) for c in group], right=columns[1:])
        shifted = [c for c in group if c.shift != CLEAN]
        if changes and shifted:
            right = sum(int(c.answers[0].correct.sum()) for c in shifted)
            for line in summary(_changes(shifted), right):
                terminal.say(line)
    terminal.say("Records:")
    for record in {record.id: record for c in comparisons for record in c.records}.values():
        terminal.say(f"  {out / record.id / 'record.json'}")
    if page is None:
        terminal.say("For a report with figures: pip install 'cliquetta[report]' and run again.")
    else:
        terminal.say(f"Report: {page}")
    report = None if page is None else str(page)
    terminal.document([_plain(c, out) | {"report": report} for c in comparisons])


def _groups(comparisons: Sequence[Comparison]) -> list[list[Comparison]]:
    """Comparisons that make one table: neighbours of the same methods and batch size."""
    by = itertools.groupby(comparisons, lambda c: ([r.method for r in c.records], c.batch_size))
    return [list(group) for _, group in by]


def table_columns(methods: Sequence[str]) -> list[str]:
    """Headers of the table; ``fixed`` are wrong answers set right, ``broken`` the reverse.

    These counts are for one method; of several the sentences below the table have them.
    """
    columns = ["shift", f"{PLAIN} %"]
    for method in methods:
        columns += [f"{method} %", "gain"]
    return [*columns, "changed", "fixed", "broken"] if len(methods) == 1 else columns


def _row(comparison: Comparison) -> list[str]:
    plain, *adapted = (number(record.metrics["top1"]) for record in comparison.records)
    found = [_counts(change) for change in comparison.changes.values()]
    row = [comparison.shift, plain]
    for top1, counts in zip(adapted, found, strict=True):
        row += [top1, f"{counts['gain']:+.2f}"]
    if len(found) == 1:
        row += [str(found[0][key]) for key in ("changed", "repaired", "broken")]
    return row


def _counts(change: Changes) -> dict[str, Any]:
    """A change as JSON types."""
    assert change.test is not None  # the bundled images have labels
    return {
        "images": change.images,
        "changed": change.changed,
        "repaired": change.test.repaired,
        "broken": change.test.broken,
        "gain": change.gain,
    }


def _plain(comparison: Comparison, out: Path) -> dict[str, Any]:
    """A comparison as JSON types: ``change`` has one entry per method, ``runs`` zero-shot too."""
    return {
        "shift": comparison.shift,
        "batch_size": comparison.batch_size,
        "change": [
            {"method": method, **_counts(change)} for method, change in comparison.changes.items()
        ],
        "runs": [
            {
                "method": record.method,
                "top1": record.metrics["top1"],
                "ece": record.metrics["ece"],
                "images_per_second": record.throughput["images_per_second"],
                "record": str(out / record.id / "record.json"),
            }
            for record in comparison.records
        ],
    }
