"""Parts of the commands that run grids: progress bars, executors, exit codes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from cliquetta.cli.command import FAILED, SKIPPED
from cliquetta.cli.console import Bars, Terminal
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.grid import RunSpec
    from cliquetta.evaluation.progress import RunReport, Step
    from cliquetta.evaluation.record import Record
    from cliquetta.evaluation.sweep import Executor, RunContext, RunResult

REDRAW_SECONDS = 0.2


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

    Every method and dataset of the grid has been built once when it starts: bad names
    end the command before the first run. ``watch`` sees every batch of a run here.
    """
    from cliquetta.evaluation.sweep import sweep

    if gpus is not None and ray is None:
        raise UserError("--ray-gpus is for --ray")
    with terminal.bars() as shown:
        bars = GridBars(shown, len(dict.fromkeys(specs)), terminal)
        context.on_prepare = bars.show
        context.on_download = partial(bars.show, "download", note="bytes")
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


class GridBars:
    """One bar for the grid, and one for everything under way."""

    def __init__(self, bars: Bars, runs: int, terminal: Terminal) -> None:
        self._bars = bars
        self._runs = runs
        self._terminal = terminal
        self._drawn: dict[str, float] = {}  # when each bar was drawn last
        self._over: list[str] = []
        bars.show("runs", 0, runs)

    def step(self, spec: RunSpec, now: Step | RunReport) -> None:
        """Draw that a batch of a run is done; now and then, because accuracy takes time."""
        name = str(spec)
        if name in self._over:  # a report that was still on its way
            return
        seconds = time.monotonic()
        if seconds - self._drawn.get(name, 0.0) < REDRAW_SECONDS:
            return
        self._drawn[name] = seconds
        accuracy = now.accuracy
        note = "" if accuracy is None else f"{accuracy:.1f} %"
        self._bars.show(name, now.number, now.batches, note)

    def show(
        self, name: str, done: int, total: int | None, note: str = "images"
    ) -> None:
        """Draw that images are read or encoded, or bytes of a checkpoint have arrived."""
        self._bars.show(name, done, total, note)
        if done == total:
            self._bars.remove(name)

    def ended(self, result: RunResult) -> None:
        """Note that a run is over."""
        name = str(result.spec)
        self._over.append(name)
        self._bars.show("runs", len(self._over), self._runs)
        self._bars.remove(name)
        if result.record is None:
            self._terminal.fail(f"{name}: {result.error}")


def finish(results: Sequence[RunResult], terminal: Terminal) -> None:
    """Warn where zero-shot is so low that labels look wrong; end with the grid's exit code."""
    from cliquetta.evaluation.metrics import near_chance

    records = [result.record for result in results if result.record is not None]

    # Labels that do not fit the class list look like chance.
    plain: dict[str, Record] = {}
    for record in records:
        if record.method == "zero_shot":
            plain.setdefault(record.dataset, record)
    for dataset, record in plain.items():
        if "top1" not in record.metrics or "@" in dataset:
            continue
        doubt = near_chance(
            record.metrics["top1"] / 100,
            classes=int(record.settings["prompts"]["classes"]),
            images=record.images,
        )
        if doubt:
            terminal.warn(f"{dataset}: {doubt}")
    if len(records) < len(results):
        raise typer.Exit(FAILED)
    if any(record.skipped for record in records):
        raise typer.Exit(SKIPPED)
