"""``cliquetta demo``: adaptation on the bundled model and images, in a few minutes on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.cli.command import Common, command
from cliquetta.cli.console import Terminal, count, number
from cliquetta.cli.executing import executing, finish
from cliquetta.cli.options import BatchSize, split_list
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.predictions import Predictions
    from cliquetta.evaluation.record import Record
    from cliquetta.report.changes import Changes

PLAIN = "zero_shot"
SHIFTS = ("gaussian_noise:3", "defocus_blur:3", "contrast:3", "jpeg_compression:3")
"""The development shifts: a fixed list that no test gain has chosen."""
_EXAMPLES = """
cliquetta demo

cliquetta demo --shifts fog:4,contrast:3 --images 128 --method scap,scap_domain

cliquetta demo --method zero_shot
"""


@dataclass(frozen=True)
class Comparison:
    """The runs on one shift, zero-shot first, with their predictions."""

    shift: str
    records: tuple[Record, ...]
    answers: tuple[Predictions, ...]

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
    ] = "scap_domain,tda",
    shifts: Annotated[
        str, typer.Option(help="Shifts as NAME:SEVERITY, comma-separated.")
    ] = ",".join(SHIFTS),
    images: Annotated[int, typer.Option(min=1, max=2000, help="Images per shift.")] = 512,
    batch_size: BatchSize = 64,
    seed: Annotated[int, typer.Option(help="Seed of the order and of the method.")] = 0,
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("demo"),
) -> None:
    """Classify shifted images with plain CLIP and with adapting methods, side by side.

    Model and images are bundled: a small CLIP trained on CIFAR images, and a slice of CIFAR-10's
    test set that it never saw, with corruptions that it never saw either.
    """
    from cliquetta.evaluation.grid import RunSpec, grid, with_method
    from cliquetta.evaluation.predictions import load_predictions
    from cliquetta.evaluation.sweep import RunContext, sweep

    base = RunSpec("", PLAIN, batch_size=batch_size, limit=images, dtype=common.dtype)
    cells = [base, *(with_method(base, name) for name in read_methods(method))]
    wanted = split_list(shifts, "shifts")
    specs = grid(cells, datasets=[f"bundled@{shift}" for shift in wanted], seeds=[seed])
    context = RunContext(out, device=common.place(), evidence=True)
    with executing(specs, context, common.terminal) as at:
        results = sweep(specs, context, at.executor, on_step=at.bars.step, on_result=at.bars.ended)
    records = [result.record for result in results if result.record is not None]
    if len(records) == len(specs):
        pairs = [(record, load_predictions(out / record.id)) for record in records]
        rows = [pairs[i : i + len(cells)] for i in range(0, len(pairs), len(cells))]
        comparisons = [
            Comparison(shift, tuple(r for r, _ in row), tuple(a for _, a in row))
            for shift, row in zip(wanted, rows, strict=True)
        ]
        _report(comparisons, out, _make_page(comparisons, out), common.terminal)
    finish(results, common.terminal)


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
    changes = _changes(comparisons)
    columns = table_columns(list(changes))
    terminal.table(columns, [_row(c) for c in comparisons], right=columns[1:])
    if changes:
        right = sum(int(c.answers[0].correct.sum()) for c in comparisons)
        for line in summary(changes, right):
            terminal.say(line)
    terminal.say("Records:")
    for record in (record for c in comparisons for record in c.records):
        terminal.say(f"  {out / record.id / 'record.json'}")
    if page is None:
        terminal.say("For a report with figures: pip install 'cliquetta[report]' and run again.")
    else:
        terminal.say(f"Report: {page}")
    report = None if page is None else str(page)
    terminal.document([_plain(c, out) | {"report": report} for c in comparisons])


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
