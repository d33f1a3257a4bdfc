"""``cliquetta demo``: adaptation on the bundled model and images, in about a minute on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.cli.command import Common
from cliquetta.cli.console import Terminal, count, number
from cliquetta.cli.executing import finish, run_grid
from cliquetta.cli.options import BatchSize, split_list
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.grid import RunSpec
    from cliquetta.evaluation.predictions import Predictions
    from cliquetta.evaluation.progress import Step
    from cliquetta.evaluation.record import Record
    from cliquetta.evaluation.sweep import RunContext, RunResult
    from cliquetta.report.changes import Changes

PLAIN = "zero_shot"
CLEAN = "clean"
"""The name of no shift at all."""
SHIFTS = ("contrast:5", "gaussian_noise:5", "defocus_blur:5", "jpeg_compression:5", CLEAN)
"""The development shifts at full severity, and images as they are. That contrast comes first, and
the numbers of images, were chosen after looking at gains and p values here: a show, no evidence."""
FEW_CLIQUES = "defocus_blur:5"
"""Few of its images are alike, so that SCAP learns the prompts of few cliques."""
SIGNIFICANT = 0.01
"""A difference of accuracy is stated as a gain or a loss if it is less likely by chance."""
NO_GAIN = "none"
"""What a table says of a smaller difference."""
_BAR = 20
"""Columns of a bar of 100 %."""
EXAMPLES = """
cliquetta demo

cliquetta demo --shifts fog:4,contrast:3 --images 128 --method scap,domain_norm

cliquetta demo --method zero_shot
"""


@dataclass(frozen=True)
class StreamComparison:
    """The runs on one stream, zero-shot first, with their predictions."""

    shift: str
    """Of what the stream consists, as the table says it."""
    records: tuple[Record, ...]
    answers: tuple[Predictions, ...]

    @property
    def batch_size(self) -> int:
        """Images per batch of the methods."""
        return int(self.records[-1].settings["stream"]["batch_size"])

    @property
    def changes(self) -> Mapping[str, Changes]:
        """Changes of each method's predictions against zero-shot."""
        return _changes([self])


def _changes(comparisons: Sequence[StreamComparison]) -> dict[str, Changes]:
    """Over all shifts, by method."""
    from cliquetta.report.changes import count_changes

    methods = [record.method for record in comparisons[0].records]
    return {
        method: count_changes([(c.answers[0], c.answers[place]) for c in comparisons])
        for place, method in enumerate(methods)
        if place
    }


def demo(
    common: Common,
    method: Annotated[
        str, typer.Option(help="Methods to show beside zero_shot, comma-separated.")
    ] = "domain_norm",
    shifts: Annotated[
        str, typer.Option(help="Shifts as NAME:SEVERITY or clean, comma-separated.")
    ] = ",".join(SHIFTS),
    images: Annotated[int, typer.Option(min=1, max=2000, help="Images per shift.")] = 256,
    singles: Annotated[
        int,
        typer.Option(
            min=0, max=2000, help="Images of the first shift that also come singly; 0 for none."
        ),
    ] = 320,
    scap: Annotated[
        int, typer.Option(min=0, max=2000, help="Images for SCAP as printed; 0 for none.")
    ] = 64,
    batch_size: BatchSize = 64,
    seed: Annotated[int, typer.Option(help="Seed of the order and of the method.")] = 0,
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("demo"),
) -> None:
    """Compare plain CLIP and adapting methods on shifted images.

    Model and images are bundled: a small CLIP trained on CIFAR images, and a slice of CIFAR-10's
    test set that it never saw, with corruptions that it never saw either. The first shift is drawn
    batch by batch; the other shifts follow, then the first one with images that come one at a time,
    and SCAP as its paper prints it. Every difference is tested; one that may be chance is called
    no change. The report is about the streams in batches.
    """
    from cliquetta.evaluation.grid import RunSpec
    from cliquetta.evaluation.sweep import RunContext

    methods, wanted = read_methods(method), split_list(shifts, "shifts")
    base = RunSpec("", PLAIN, batch_size=batch_size, limit=images, dtype=common.dtype)
    first = replace(base, limit=max(images, singles))
    tables = [[DemoPart(wanted[0], wanted[0], first, methods)]]
    tables.append([DemoPart(s, s, base, methods) for s in wanted[1:] if s != CLEAN])
    tables.append([DemoPart(s, s, base, methods) for s in wanted[1:] if s == CLEAN])
    if singles and methods:
        one = replace(base, limit=singles)
        tables.append([DemoPart(f"{wanted[0]}, singly", wanted[0], one, methods[:1], batch_size=1)])
    if scap and methods and "scap" not in methods:
        shift = FEW_CLIQUES if FEW_CLIQUES in wanted else wanted[0]
        tables.append([DemoPart(shift, shift, replace(base, limit=scap), ["scap"])])
    tables = [table for table in tables if table]
    context = RunContext(out, device=common.place(), evidence=True)
    context.check([spec for table in tables for part in table for spec in part.cells(seed)])
    comparisons: list[StreamComparison] = []
    results = []
    for table in tables:
        curve = LiveCurve(common.terminal) if table is tables[0] and methods else None
        ended, compared = _run(table, context, seed, common.terminal, curve)
        results += ended
        comparisons += compared
        context.evidence = False  # pictures of one stream are enough for the report
        if len(compared) == len(table):
            _show(compared, common.terminal)
    if all(result.record is not None for result in results):
        streams = [c for c in comparisons if c.batch_size == batch_size and c.shift in wanted]
        _finish(comparisons, out, _make_page(streams, out), common.terminal)
    finish(results, common.terminal)


@dataclass(frozen=True)
class DemoPart:
    """One row of a table: a stream, and the methods that run on it beside zero-shot."""

    label: str
    shift: str
    spec: RunSpec
    methods: Sequence[str]
    batch_size: int | None = None
    """Of the methods, if it is not that of zero-shot, which predicts each image by itself."""

    def cells(self, seed: int) -> list[RunSpec]:
        """The runs, zero-shot first."""
        from cliquetta.evaluation.grid import grid, with_method

        adapting = replace(self.spec, batch_size=self.batch_size or self.spec.batch_size)
        cells = [self.spec, *(with_method(adapting, name) for name in self.methods)]
        return grid(cells, datasets=[_dataset(self.shift)], seeds=[seed])


def _run(
    table: Sequence[DemoPart],
    context: RunContext,
    seed: int,
    terminal: Terminal,
    curve: LiveCurve | None,
) -> tuple[list[RunResult], list[StreamComparison]]:
    """Run the streams of a table; the comparisons of those without failure."""
    from cliquetta.evaluation.predictions import load_predictions

    assert context.out is not None
    grids = [part.cells(seed) for part in table]
    results = run_grid([spec for cells in grids for spec in cells], context, terminal, watch=curve)
    records = {result.spec: result.record for result in results if result.record is not None}
    comparisons = []
    for part, cells in zip(table, grids, strict=True):
        if all(spec in records for spec in cells):
            own = tuple(records[spec] for spec in cells)
            answers = tuple(load_predictions(context.out / record.id) for record in own)
            comparisons.append(StreamComparison(part.label, own, answers))
    if curve is not None and comparisons:
        curve.draw(comparisons[0])
    return results, comparisons


class LiveCurve:
    """Draws the accuracy of zero-shot and of the first method over a stream, batch by batch."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.plain: list[float] = []
        self.drawn = 0

    def __call__(self, spec: RunSpec, step: Step) -> None:
        """A batch is done: zero-shot is remembered, the method drawn beside it."""
        share = step.accuracy
        if share is None:
            return
        if spec.method == PLAIN:
            self.plain.append(share)
        elif self.drawn < step.number <= len(self.plain):
            self._line(spec.method, step.images, self.plain[step.number - 1], share)

    def draw(self, comparison: StreamComparison) -> None:
        """Draw the batches that were not run now, from the recorded predictions."""
        plain, method = (answers.correct for answers in comparison.answers[:2])
        ends = [*range(comparison.batch_size, len(plain), comparison.batch_size), len(plain)]
        for end in ends[self.drawn :]:
            shares = (100 * float(correct[:end].mean()) for correct in (plain, method))
            self._line(comparison.records[1].method, end, *shares)

    def _line(self, method: str, images: int, *shares: float) -> None:
        if not self.drawn:
            names = "  ".join(f"{name:<{_BAR + 7}}" for name in (PLAIN, method))
            self.terminal.say(f"Accuracy over the stream\nimages  {names}")
        bars = "  ".join(f"{'█' * round(_BAR * s / 100):<{_BAR}} {s:4.1f} %" for s in shares)
        self.terminal.say(f"{images:>6}  {bars}")
        self.drawn += 1


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


def _make_page(comparisons: Sequence[StreamComparison], out: Path) -> Path | None:
    """The report of all runs, where matplotlib is installed."""
    from cliquetta.report.style import can_draw

    if not can_draw():
        return None
    from cliquetta.report.page import Choices, build_page, write_page
    from cliquetta.report.runs import load_runs

    folders = [out / record.id for c in comparisons for record in c.records]
    path = out / "report.html"
    write_page(build_page(*load_runs(folders), Choices(title="CliqueTTA demo")), path)
    return path


def summary(changes: Mapping[str, Changes], plain_right: int, kind: str = "shifted") -> list[str]:
    """Describe the changes by the methods in words: all in one line, then each."""
    from cliquetta.report.changes import in_words

    images = next(iter(changes.values())).images
    before = 100 * plain_right / images
    shares = [f"{PLAIN} gets {number(before)} % right"]
    shares += [f"{name} {number(before + (c.gain or 0.0))} %" for name, c in changes.items()]
    lines = [f"Of {count(images, f'{kind} image')}, {', '.join(shares[:-1])} and {shares[-1]}."]
    for method, change in changes.items():
        if change.test is None or not change.changed or change.test.p < SIGNIFICANT:
            lines.append(in_words(change, method))
        else:
            lines.append(
                f"{method} changed {change.changed:,} of {count(images, 'answer')}; the difference "
                f"in accuracy may be chance (p = {change.test.p:.2g})."
            )
    return lines


def _show(table: Sequence[StreamComparison], terminal: Terminal) -> None:
    """One table and what it says in words."""
    changes = _changes(table)
    columns = table_columns(list(changes))
    rows = [_row(c) for c in table]
    terminal.table(columns, rows, right=columns[1:])
    if any(NO_GAIN in row for row in rows):
        terminal.say(f"{NO_GAIN}: the difference may be chance (p >= {SIGNIFICANT:g})")
    if changes:
        right = sum(int(c.answers[0].correct.sum()) for c in table)
        kind = CLEAN if all(c.shift == CLEAN for c in table) else "shifted"
        for line in summary(changes, right, kind):
            terminal.say(line)


def _finish(
    comparisons: Sequence[StreamComparison], out: Path, page: Path | None, terminal: Terminal
) -> None:
    records = {record.id for c in comparisons for record in c.records}
    terminal.say(f"Records: {count(len(records), 'run')} in {out}, each with record.json")
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
    return [*columns, "fixed", "broken"] if len(methods) == 1 else columns


def _row(comparison: StreamComparison) -> list[str]:
    plain, *adapted = (number(record.metrics["top1"]) for record in comparison.records)
    found = [_counts(change) for change in comparison.changes.values()]
    row = [comparison.shift, plain]
    for top1, counts in zip(adapted, found, strict=True):
        row += [top1, f"{counts['gain']:+.2f}" if counts["p"] < SIGNIFICANT else NO_GAIN]
    if len(found) == 1:
        row += [str(found[0][key]) for key in ("repaired", "broken")]
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
        "p": change.test.p,
    }


def _plain(comparison: StreamComparison, out: Path) -> dict[str, Any]:
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
