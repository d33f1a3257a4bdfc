"""Where a grid runs, and its bars: this process, a Ray cluster, or the processes of torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from rich.progress import Progress, TaskID

from cliquetta.cli.console import Terminal
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.sweep import Executor, RunContext, RunResult, RunSpec


class Moment(Protocol):
    """How far a run is: a step of one here, or a report of one elsewhere."""

    @property
    def number(self) -> int:
        """Batches done."""
        ...

    @property
    def batches(self) -> int:
        """Batches in all."""
        ...

    @property
    def accuracy(self) -> float | None:
        """Top-1 so far in percent."""
        ...


if TYPE_CHECKING:
    Observe = Callable[[RunSpec, Moment], None]
    MakeExecutor = Callable[[Observe], Executor]


@dataclass(frozen=True)
class Choice:
    """An executor, and what the command needs to know of it."""

    executor: MakeExecutor
    context: RunContext
    """Where the runs happen."""
    checked: RunContext
    """One of this machine, on which names and settings are checked first."""
    terminal: Terminal
    leads: bool = True
    """Whether this process is the one that reports."""


@contextmanager
def choose_executor(
    context: RunContext, terminal: Terminal, *, ray: str | None, gpus: float | None
) -> Iterator[Choice]:
    """The executor that the options and the environment ask for."""
    from cliquetta.evaluation.distributed import TeamExecutor, join_team, leave_team, team_size
    from cliquetta.evaluation.sweep import SerialExecutor

    if gpus is not None and ray is None:
        raise UserError("--ray-gpus is for --ray")
    if ray is not None:
        from cliquetta.evaluation.cluster import RayExecutor

        where = ray
        here = replace(context, device="cpu")
        yield Choice(
            lambda observe: RayExecutor(where, gpus=gpus, on_report=observe),
            *(context, here, terminal),
        )
        return
    if team_size() == 1:
        yield Choice(SerialExecutor, context, context, terminal)
        return
    if context.evidence:
        raise UserError("--evidence is kept by one process: run without torchrun")
    team, device = join_team(context.device)
    own = replace(context, device=device)
    quiet = terminal if team.leads else replace(terminal, quiet=True)
    yield Choice(lambda observe: TeamExecutor(team, observe), own, own, quiet, team.leads)
    leave_team()  # not after an error: the others are ended by torchrun


def run_cells(
    specs: Sequence[RunSpec],
    context: RunContext,
    terminal: Terminal,
    executor: MakeExecutor | None = None,
) -> list[RunResult]:
    """Run a grid with bars for its runs, and for the batches of those under way."""
    from cliquetta.evaluation.sweep import SerialExecutor, sweep

    with terminal.progress() as progress:
        bars = _Bars(progress, len(specs))
        context.on_encode = bars.encoding

        def ended(result: RunResult) -> None:
            bars.ended(str(result.spec))
            if result.record is None:
                terminal.warn(f"{result.spec} failed: {result.error}")

        made = (executor or SerialExecutor)(bars.step)
        return sweep(specs, context, made, on_result=ended)


class _Bars:
    """One bar for the grid, and one for everything under way."""

    def __init__(self, progress: Progress, runs: int) -> None:
        self.progress = progress
        self.runs = progress.add_task("runs", total=runs, note="")
        self.under_way: dict[str, TaskID] = {}
        self.over: set[str] = set()

    def step(self, spec: RunSpec, now: Moment) -> None:
        """A batch of a run is done."""
        note = "" if now.accuracy is None else f"{now.accuracy:.1f} %"
        self._show(str(spec), now.number, now.batches, note)

    def encoding(self, dataset: str, done: int, total: int) -> None:
        """Images of a data set are encoded."""
        name = f"encode {dataset}"
        self._show(name, done, total, "images")
        if done == total:
            self.progress.remove_task(self.under_way.pop(name))

    def ended(self, name: str) -> None:
        """A run is over; a report of it may still be on its way."""
        self.over.add(name)
        self.progress.advance(self.runs)
        bar = self.under_way.pop(name, None)
        if bar is not None:
            self.progress.remove_task(bar)

    def _show(self, name: str, done: int, total: int, note: str) -> None:
        if name in self.over:
            return
        if name not in self.under_way:
            self.under_way[name] = self.progress.add_task(name, total=total, note=note)
        self.progress.update(self.under_way[name], completed=done, total=total, note=note)
