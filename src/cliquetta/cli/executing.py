"""Parts of the commands that run grids: options, progress bars, executors, exit codes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID

from cliquetta.cli.command import FAILED, SKIPPED
from cliquetta.cli.console import Terminal
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.grid import RunSpec
    from cliquetta.evaluation.progress import RunReport, Step
    from cliquetta.evaluation.record import Record
    from cliquetta.evaluation.sweep import Executor, RunContext, RunResult

REDRAW_SECONDS = 0.2

Seeds = Annotated[str, typer.Option(help="Seeds of order, views and methods: 0,1,2.")]
Out = Annotated[Path, typer.Option(help="Output directory; completed runs are reused.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use at most N images per dataset.")]
RUNS = Path("runs")


def read_seeds(given: str) -> list[int]:
    """The whole numbers of ``0,1,2``."""
    from cliquetta.cli.options import split_list

    try:
        return [int(seed) for seed in split_list(given, "seeds")]
    except ValueError:
        raise UserError(f"--seeds takes whole numbers such as 0,1,2, got {given!r}") from None


def run_grid(
    specs: Sequence[RunSpec],
    context: RunContext,
    terminal: Terminal,
    *,
    ray: str | None = None,
    gpus: float | None = None,
    watch: Callable[[RunSpec, Step], None] | None = None,
) -> list[RunResult]:
    """Run a grid with bars, wherever the options and the environment ask for.

    Every method and dataset of the grid has been built once when it starts: bad names end the
    command before the first run. ``watch`` sees every batch of a run here.
    """
    from cliquetta.evaluation.sweep import sweep

    if gpus is not None and ray is None:
        raise UserError("--ray-gpus is for --ray")
    with terminal.progress() as progress:
        bars = Bars(progress, len(dict.fromkeys(specs)), terminal)
        context.on_prepare, context.on_download = bars.show, bars.downloading
        if ray is not None:
            from cliquetta.evaluation.cluster import RayExecutor

            replace(context, device="cpu").check(specs)
            executor: Executor | None = RayExecutor(ray, gpus=gpus, on_report=bars.step)
        else:
            context.check(specs)
            executor = None

        def step(spec: RunSpec, now: Step) -> None:
            bars.step(spec, now)
            if watch is not None:
                watch(spec, now)

        return sweep(specs, context, executor, on_step=step, on_result=bars.ended)


class Bars:
    """One bar for the grid, and one for everything under way."""

    def __init__(self, progress: Progress, runs: int, terminal: Terminal | None = None) -> None:
        self.progress = progress
        self.terminal = terminal
        self.runs = progress.add_task("runs", total=runs, note="")
        self.under_way: dict[str, TaskID] = {}
        self.drawn: dict[str, float] = {}
        self.over: set[str] = set()

    def step(self, spec: RunSpec, now: Step | RunReport) -> None:
        """A batch of a run here or elsewhere is done; drawn now and then: accuracy takes time."""
        name = str(spec)
        if time.monotonic() - self.drawn.get(name, 0.0) >= REDRAW_SECONDS:
            self.drawn[name] = time.monotonic()
            note = "" if now.accuracy is None else f"{now.accuracy:.1f} %"
            self._show(name, now.number, now.batches, note)

    def show(self, what: str, done: int, total: int) -> None:
        """Images of a dataset are read or encoded."""
        self._show(what, done, total, "images")
        if done == total:
            self._remove(what)

    def downloading(self, done: int, total: int | None) -> None:
        """Bytes of a checkpoint have arrived."""
        self._show("download", done, total, "bytes")
        if done == total:
            self._remove("download")

    def ended(self, result: RunResult) -> None:
        """A run is over; a report of it may still be on its way."""
        name = str(result.spec)
        self.over.add(name)
        self.progress.advance(self.runs)
        self._remove(name)
        if result.record is None and self.terminal is not None:
            self.terminal.fail(f"{name}: {result.error}")

    def _remove(self, name: str) -> None:
        bar = self.under_way.pop(name, None)
        if bar is not None:
            self.progress.remove_task(bar)

    def _show(self, name: str, done: int, total: int | None, note: str) -> None:
        if name in self.over:
            return
        if name not in self.under_way:
            self.under_way[name] = self.progress.add_task(name, total=total, note=note)
        self.progress.update(self.under_way[name], completed=done, total=total, note=note)


def finish(results: Sequence[RunResult], terminal: Terminal) -> None:
    """Warn of what looks wrong; end with the exit code of a grid that ran."""
    records = [result.record for result in results if result.record is not None]
    _warn_of_doubts(records, terminal)
    if len(records) < len(results):
        raise typer.Exit(FAILED)
    if any(record.skipped for record in records):
        raise typer.Exit(SKIPPED)


def _warn_of_doubts(records: Sequence[Record], terminal: Terminal) -> None:
    """Warn where zero-shot is so low that labels are more likely wrong than the model."""
    from cliquetta.evaluation.metrics import near_chance

    plain = {r.dataset: r for r in reversed(records) if r.method == "zero_shot"}
    for dataset, first in reversed(plain.items()):
        if "top1" not in first.metrics or "@" in dataset:
            continue
        classes = int(first.settings["prompts"]["classes"])
        doubt = near_chance(first.metrics["top1"] / 100, classes=classes, images=first.images)
        if doubt:
            terminal.warn(f"{dataset}: {doubt}")
