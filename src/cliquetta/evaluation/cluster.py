"""Grids on a Ray cluster: one task per run, wherever there is room.

Every machine sees the same files. A run keeps its state in its folder, so that it
continues on another machine when one is lost.
"""

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from cliquetta.errors import UserError
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.progress import ProgressBoard, RunReport, Step
from cliquetta.evaluation.sweep import RunContext, RunResult
from cliquetta.ray_connection import LOCAL, connected

FINAL = (ValueError, KeyError, TypeError, ImportError)
"""Errors that a second attempt would only repeat."""
REPORT_SECONDS = 0.5

_log = logging.getLogger(__name__)


@dataclass
class RayExecutor:
    """Runs cells as tasks of a Ray cluster (extra ``ray``); reports and results come back.

    A connection that exists already is used and left open; else one is opened for the
    grid.
    """

    # ``local``, ``auto`` (the cluster of this machine) or ``ray://host:port``
    address: str = LOCAL
    cpus: float = 1.0  # cores of a run; also the threads it computes with
    gpus: float | None = None
    """share of one per run; ``None``: all of it if there is any"""
    retries: int = 3  # of a run that failed on the way or was lost with its worker
    on_report: Callable[[RunSpec, RunReport], None] | None = None

    def run(self, context: RunContext, specs: Sequence[RunSpec]) -> Iterator[RunResult]:
        """Run all of ``specs`` at once, as far as there is room; results as they come."""
        if ":" in context.device:
            raise UserError(
                f"the cluster chooses which GPU a run gets: write --device cuda, not "
                f"{context.device}"
            )
        with connected(self.address) as ray:
            grid = _Grid(ray, self, context, specs)
            try:
                yield from grid.run()
            finally:  # what is still running is stopped; its state stays in its folder
                for task in grid.running:
                    ray.cancel(task, force=True)
                ray.kill(grid.board)


class _Grid:
    """The tasks of one grid."""

    def __init__(
        self,
        ray: Any,
        settings: RayExecutor,
        context: RunContext,
        specs: Sequence[RunSpec],
    ) -> None:
        self.ray = ray
        self.settings = settings
        self.specs = specs
        self.context = ray.put(pickle.dumps(context))
        self.folder = str(Path.cwd())

        present = ray.cluster_resources().get("GPU", 0)
        share = settings.gpus
        if share is None:
            share = 1.0 if present and context.device != "cpu" else 0.0
        elif share > present:
            raise UserError(
                f"a run is to have {share} GPUs, the cluster has {present:.0f}"
            )

        # Retries are ours: a run that goes on elsewhere has its state on disk.
        as_task = ray.remote(num_cpus=settings.cpus, num_gpus=share, max_retries=0)
        self.task = as_task(_run_there)
        as_actor = ray.remote(num_cpus=0)
        self.board = as_actor(ProgressBoard).remote()
        self.reports = self.board.take.remote()
        self.attempts = [0] * len(specs)
        self.running: dict[Any, int] = {}  # task -> number of its run
        self.later = [(0.0, run) for run in range(len(specs))]  # when to send which run

    def run(self) -> Iterator[RunResult]:
        """Send what is due and settle what has ended, until nothing is left."""
        threads = max(1, int(self.settings.cpus))
        while self.running or self.later:
            due = [run for when, run in self.later if when <= time.monotonic()]
            self.later = [entry for entry in self.later if entry[1] not in due]
            for run in due:
                task = self.task.remote(
                    self.context,
                    self.specs[run],
                    run,
                    self.board,
                    folder=self.folder,
                    threads=threads,
                )
                self.running[task] = run

            ready: list[Any] = []
            if self.running:
                ready, _ = self.ray.wait(list(self.running), timeout=REPORT_SECONDS)
            else:
                time.sleep(REPORT_SECONDS)
            self._pass_on_reports()
            for task in ready:
                result = self._settle(task)
                if result is not None:
                    yield result

    def _settle(self, task: Any) -> RunResult | None:
        """Return the result of a task that ended, or ``None`` if its run will be sent again."""
        run = self.running.pop(task)
        final = False
        result: RunResult
        try:
            result, final = self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            # The worker or its machine is gone.
            reason = next(iter(str(error).splitlines()), "")
            text = f"{type(error).__name__}: {reason}"
            result = RunResult(self.specs[run], error=text)
        if final or self.attempts[run] >= self.settings.retries:
            return result
        # Not at once: a lost machine may hold the lock of the run's folder a little
        # longer.
        self.later.append((time.monotonic() + 2.0 ** self.attempts[run], run))
        self.attempts[run] += 1
        _log.warning("%s is sent again: %s", result.spec, result.error)
        return None

    def _pass_on_reports(self) -> None:
        """Hand on what is new; runs never wait for the board, nor do we."""
        ready, _ = self.ray.wait([self.reports], timeout=0)
        if not ready:
            return
        try:
            reports: dict[int, RunReport] = self.ray.get(self.reports)
            self.reports = self.board.take.remote()
        except self.ray.exceptions.RayError:
            return  # the actor died with its node: the runs go on without one
        for run, report in reports.items():
            if self.settings.on_report is not None:
                self.settings.on_report(self.specs[run], report)


def _run_there(
    context: bytes, spec: RunSpec, run: int, board: Any, folder: str, threads: int
) -> tuple[RunResult, bool]:
    """Run one cell in a worker; with whether another attempt would only repeat the result."""
    last = 0.0

    def report(step: Step) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= REPORT_SECONDS or step.number == step.batches:
            last = now
            latest = RunReport(
                number=step.number,
                batches=step.batches,
                images=step.images,
                accuracy=step.accuracy,
            )
            board.post.remote(run, latest)

    try:
        os.chdir(folder)  # paths were given as seen from there
        torch.set_num_threads(threads)
        return RunResult(spec, _context(context).run(spec, report)), True
    except Exception as error:  # travels as text: not every error can be sent
        final = isinstance(error, FINAL)
        return RunResult(spec, error=f"{type(error).__name__}: {error}"), final


@lru_cache(maxsize=1)
def _context(packed: bytes) -> RunContext:
    """Share one context among the runs of a worker process, so that its model is loaded once."""
    context: RunContext = pickle.loads(packed)
    return context
