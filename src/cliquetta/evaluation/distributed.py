"""Several processes of ``torchrun`` at one run: the first writes, all compute.

A run that is taken up again must be taken up by all of them at the same batch. The first process
therefore tells the others how a run begins: it is finished, it is new, or this is its state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.progress import Step
from cliquetta.evaluation.runner import evaluate
from cliquetta.evaluation.sweep import RunContext, RunResult, observer

WAIT = timedelta(days=7)
"""A process may wait this long: the others at runs that are not divided. torchrun ends the rest
when one dies."""


@runtime_checkable
class Divisible(Protocol):
    """A method whose work on one batch several processes can share."""

    def split_work(self) -> bool:
        """Share the work on every batch among all processes of ``torch.distributed``.

        Returns whether there is anything to share. If so, all processes must predict the same
        batches in the same order.
        """
        ...


def team_size() -> int:
    """How many processes ``torchrun`` started; 1 without it."""
    started = {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return int(os.environ.get("WORLD_SIZE", "1")) if started else 1


@dataclass(frozen=True)
class Team:
    """The processes that ``torchrun`` started, as one of them sees it."""

    rank: int
    size: int

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes records and talks to the user."""
        return self.rank == 0

    def share(self, value: Any) -> Any:
        """What the first process passes in; the others' values are ignored."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def first_error(self, error: str) -> str:
        """The first of all processes' errors, on all of them; empty if there is none."""
        errors: list[Any] = [""] * self.size
        dist.all_gather_object(errors, error)
        return next((found for found in errors if found), "")


def join_team(device: str) -> tuple[Team, str]:
    """Meet the other processes; returns the team and this process's own device."""
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    # Both: gradients go from GPU to GPU, states and errors from memory to memory.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=WAIT)
    return Team(dist.get_rank(), dist.get_world_size()), device


def leave_team() -> None:
    """Let go of the other processes."""
    dist.destroy_process_group()


@dataclass
class TeamExecutor:
    """Cell after cell; SCAP divided between all processes, other methods by the first alone.

    An error inside a run is not turned into a result: the processes could no longer tell where
    the others are. It ends them all, and the command given again continues the run.
    """

    team: Team
    on_step: Callable[[RunSpec, Step], None] | None = None

    def run(self, context: RunContext, specs: Sequence[RunSpec]) -> Iterator[RunResult]:
        """Run ``specs`` in order; processes other than the first yield what they took part in."""
        for spec in specs:
            error = ""
            try:
                adapter, stream = context.prepare(spec)
            except Exception as reason:
                error = f"{type(reason).__name__}: {reason}"
            error = self.team.first_error(error)
            if error:
                yield RunResult(spec, error=error)
                continue
            divided = isinstance(adapter, Divisible) and adapter.split_work()
            if not divided and not self.team.is_main_process:
                continue
            yield RunResult(
                spec,
                evaluate(
                    adapter,
                    stream,
                    out=context.out,
                    preset=spec.preset,
                    on_step=observer(spec, self.on_step),
                    team=self.team if divided else None,
                ),
            )
