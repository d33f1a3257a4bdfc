"""``cliquetta demo``: the main job on the bundled model and images, in a few minutes on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, TaskID

from cliquetta.cli.command import Common, command
from cliquetta.cli.console import Terminal, count, number
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.data.dataset import Dataset
    from cliquetta.evaluation.record import Predictions, Record
    from cliquetta.evaluation.runner import Step
    from cliquetta.methods.base import Adapter
    from cliquetta.report.changes import Changes

PLAIN = "zero_shot"
_EXAMPLES = """
cliquetta demo

cliquetta demo --shifts fog:4,contrast:3 --images 512 --method tda,scap_domain

cliquetta demo --method zero_shot
"""


@dataclass(frozen=True)
class Comparison:
    """One shift: its runs, zero-shot first, and what lies between them."""

    shift: str
    records: tuple[Record, ...]
    answers: tuple[Predictions, ...]
    """One per record."""

    @property
    def changes(self) -> Mapping[str, Changes]:
        """How the answers of each method differ from those of zero-shot; by method."""
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
        str,
        typer.Option(help="Shown beside zero-shot, several with commas; see `cliquetta methods`."),
    ] = "scap,scap_domain",
    shifts: Annotated[
        str, typer.Option(help="name:severity, several with commas; see `cliquetta datasets`.")
    ] = "gaussian_noise:1,motion_blur:4,fog:4,jpeg_compression:3",
    images: Annotated[int, typer.Option(min=1, max=2000, help="Images per shift.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the order and of the method.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the records of the runs go.")] = Path("demo"),
) -> None:
    """Classify shifted images with plain CLIP and with adapting methods, side by side.

    Model and images come with the package: a small CLIP trained on CIFAR images, and a slice of
    CIFAR-10's test set that it never saw, with corruptions that it never saw either.
    """
    from cliquetta.cli.options import split_list
    from cliquetta.data.catalogue import get_dataset
    from cliquetta.methods.registry import create_method

    names = [PLAIN, *read_methods(method)]
    wanted = split_list(shifts, "shifts")
    datasets = [get_dataset(f"bundled@{shift}") for shift in wanted]
    model = common.model("micro")
    adapters = [create_method(name, model, datasets[0].prompts, seed=seed) for name in names]
    runs = _Runs(adapters, batch_size=batch_size, images=images, seed=seed, out=out)
    with common.terminal.progress() as progress:
        width = max(len(name) for name in names)
        total = len(wanted) * images
        bars = [progress.add_task(name.ljust(width), total=total, note="") for name in names]
        ticks = [_ticker(progress, bar) for bar in bars]
        comparisons = [runs.compare(dataset, ticks) for dataset in datasets]
    page = _make_page(comparisons, out)
    _report(comparisons, out, page, common.terminal)


def read_methods(given: str) -> list[str]:
    """The methods of ``a,b,c`` but zero-shot, which is always run."""
    from cliquetta.cli.options import split_list
    from cliquetta.methods.registry import get_method

    named = Counter(part.strip() for part in given.split(","))
    names = [get_method(name).name for name in split_list(given, "methods")]
    twice = [name for name in names if named[name] > 1]
    if twice:
        raise UserError(f"--method names {twice[0]} twice: name every method once")
    return [name for name in names if name != PLAIN]


def _make_page(comparisons: Sequence[Comparison], out: Path) -> Path | None:
    """The report of all runs, where matplotlib is there to draw it."""
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


@dataclass(frozen=True)
class _Runs:
    """The same stream for every method, recorded."""

    adapters: Sequence[Adapter]
    batch_size: int
    images: int
    seed: int
    out: Path

    def compare(self, dataset: Dataset, ticks: Sequence[Callable[[Step], None]]) -> Comparison:
        """Run all methods over one shift."""
        from cliquetta.evaluation.record import load_predictions

        records = [self._run(*pair, dataset) for pair in zip(self.adapters, ticks, strict=True)]
        answers = tuple(load_predictions(self.out / record.id) for record in records)
        return Comparison(dataset.id.partition("@")[2], tuple(records), answers)

    def _run(self, adapter: Adapter, tick: Callable[[Step], None], dataset: Dataset) -> Record:
        from cliquetta.data.stream import Stream
        from cliquetta.evaluation.evidence_log import EvidenceLimits
        from cliquetta.evaluation.runner import evaluate
        from cliquetta.methods.registry import name_of

        stream = Stream(
            dataset,
            adapter.model.preprocess,
            self.batch_size,
            seed=self.seed,
            views=adapter.views,
            limit=self.images,
        )
        shown = name_of(adapter) != PLAIN  # plain CLIP has nothing to explain
        evidence = EvidenceLimits(images=self.batch_size, maps=4) if shown else None
        return evaluate(adapter, stream, out=self.out, on_step=tick, evidence=evidence, again=True)


def _ticker(progress: Progress, bar: TaskID) -> Callable[[Step], None]:
    def tick(step: Step) -> None:
        progress.update(bar, advance=len(step.batch), note=f"{number(step.accuracy, 1)} % right")

    return tick


def summary(changes: Mapping[str, Changes], plain_right: int) -> list[str]:
    """In words what the methods did to the answers, good or bad: all in one line, then each."""
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
    terminal.say("Records of the runs:")
    for record in (record for c in comparisons for record in c.records):
        terminal.say(f"  {out / record.id / 'record.json'}")
    if page is None:
        terminal.say("For a page with figures: pip install 'cliquetta[report]', then run it again.")
    else:
        terminal.say(f"What happened, on one page: {page}")
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
