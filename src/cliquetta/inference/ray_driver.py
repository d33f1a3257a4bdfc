"""Prediction runs on a Ray cluster: CPU workers read and decode, actors adapt.

One Ray Data pipeline per actor: a list of batches, tasks that read them, an actor that gets them in
order. Parts are written by the process that started the run, so that they are those of a run on one
machine; an actor that dies is replaced by one that continues after the last part.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from cliquetta.errors import UserError
from cliquetta.inference.parts import Lane
from cliquetta.inference.ray_actor import (
    ActorSetup,
    BatchReport,
    BatchTask,
    PredictActor,
    read_batch,
    to_table,
)
from cliquetta.inference.resumable import FileRun
from cliquetta.ray_connection import LOCAL, connected

WINDOW = 4096
"""Batches of one pipeline: bounds the memory of the process that started the run."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster for :func:`cliquetta.predict` to run on (extra ``ray``)."""

    address: str = LOCAL
    """``local``, ``auto`` (the cluster of this machine) or an address."""
    actors: int | None = None
    """Lanes that are adapted to at the same time; by default as many as there are GPUs, or one."""
    gpus_per_actor: float | None = None
    """Share of a GPU of an actor; by default all of one if the cluster has any, else none."""
    threads: int = 1
    """CPU threads, and cores, of an actor without a GPU."""
    retries: int = 3
    """How often an actor is replaced that finished no part."""

    @contextmanager
    def connect(self) -> Iterator[RayWorkers]:
        """The actors, for as long as a run goes on."""
        needed = (self.actors or 1) * self.threads + 1
        with connected(self.address, max(os.cpu_count() or 1, needed)) as ray:
            try:
                import ray.data
            except ImportError:
                raise UserError("--ray needs an extra: pip install 'cliquetta[ray]'") from None
            has = {"CPU": 0.0, "GPU": 0.0, **ray.cluster_resources()}
            gpus = self.gpus_per_actor
            if gpus is None:
                gpus = 1.0 if has["GPU"] else 0.0
            actors = self.actors or max(1, int(has["GPU"] / gpus) if gpus else 1)
            cores = 0 if gpus else self.threads
            if gpus * actors > has["GPU"]:
                raise UserError(
                    f"{actors} actors with {gpus} GPUs each are too many for a cluster with "
                    f"{has['GPU']:.0f}: lower --actors or --gpus-per-actor"
                )
            if cores * actors + 1 > has["CPU"]:
                raise UserError(
                    f"{actors} actors and a reader need {cores * actors + 1} CPU cores, the "
                    f"cluster has {has['CPU']:.0f}: lower --actors"
                )
            logger = logging.getLogger("ray.data")
            level = logger.level
            logger.setLevel(logging.CRITICAL)  # what goes wrong is reported here, once
            try:
                yield RayWorkers(ray, self, actors, gpus, cores)
            finally:
                logger.setLevel(level)


def share_out(sizes: Mapping[Lane, int], tracks: int) -> list[list[Lane]]:
    """Lanes for each track, of about the same sizes in sum: the largest first, to the emptiest."""
    shares: list[list[Lane]] = [[] for _ in range(min(tracks, len(sizes)))]
    filled = [0] * len(shares)
    for lane in sorted(sizes, key=lambda lane: (-sizes[lane], lane.start)):
        emptiest = filled.index(min(filled))
        shares[emptiest].append(lane)
        filled[emptiest] += sizes[lane]
    return shares


@dataclass
class RayWorkers:
    """The actors of one run."""

    ray: Any
    settings: RayCluster
    actors: int
    gpus: float
    cores: int
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the run is to end."""
    errors: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def do(self, work: FileRun) -> None:
        """Predict what is in no part yet: lanes shared out among the actors, a thread for each."""
        device = "cuda" if self.gpus else "cpu"
        setup = self.ray.put(pickle.dumps(ActorSetup.of(work, device, self.settings.threads)))
        sizes = {lane: lane.stop - work.parts.done(lane) for lane in work.unfinished()}
        threads = [
            threading.Thread(target=self._follow, args=(work, lanes, setup), daemon=True)
            for lanes in share_out(sizes, self.actors)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)  # so that Ctrl-C is noticed
        finally:
            self.over.set()
            for thread in threads:
                thread.join(10.0)
        if self.errors:
            raise self.errors[0]

    def _follow(self, work: FileRun, lanes: Sequence[Lane], setup: Any) -> None:
        """Work off the lanes of one actor; an actor that is lost is replaced."""
        attempts = 0
        try:
            while not self.over.is_set() and (left := _left(work, lanes)):
                try:
                    self._stream(work, lanes, setup)
                except self.ray.exceptions.RayError as error:
                    if self.over.is_set():
                        return
                    attempts = attempts + 1 if _left(work, lanes) == left else 0
                    if attempts > self.settings.retries:
                        raise
                    reason = next(iter(str(error).splitlines()), "")
                    _log.warning("an actor is replaced: %s: %s", type(error).__name__, reason)
                    self.over.wait(2.0**attempts)
        except BaseException as error:
            self.errors.append(error)
            self.over.set()

    def _tasks(self, work: FileRun, lanes: Sequence[Lane]) -> Iterator[BatchTask]:
        """The next batches of the lanes."""
        size = work.predictor.batch_size
        batches = (
            (lane, begin, first)
            for lane, begin in _left(work, lanes)
            for first in range(begin, lane.stop, size)
        )
        for number, (lane, begin, first) in enumerate(islice(batches, WINDOW), start=1):
            with self.lock:
                segment = work.source.segment(first, min(first + size, lane.stop))
                states = work.states(lane) if first == begin else None
            yield BatchTask(lane, first, segment, states, due=number == WINDOW)

    def _stream(self, work: FileRun, lanes: Sequence[Lane], setup: Any) -> None:
        """Let batches flow through readers and an actor, and add the parts that come out."""
        from ray.data import from_arrow

        reader = replace(work.predictor.reader, workers=0, device=None, model=None)
        batches = from_arrow([to_table(task) for task in self._tasks(work, lanes)])
        batches.context.execution_options.preserve_order = True
        batches.context.enable_progress_bars = False
        read_there: Any = read_batch
        one: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}
        read = batches.map_batches(read_there, fn_args=(reader, str(Path.cwd())), num_cpus=1, **one)
        # batches one after the other; a batch that is lost with its actor ends the stream. Without
        # restarts Ray Data waits for ever for an actor that was idle; a new one lacks the states
        options = {"max_restarts": -1, "max_task_retries": 0, "allow_out_of_order_execution": False}
        reports = read.map_batches(
            PredictActor,
            fn_constructor_args=(setup,),
            concurrency=1,
            num_cpus=self.cores,
            num_gpus=self.gpus,
            ray_remote_args_fn=lambda: options,
            **one,
        )
        # closed here: what Ray Data left running would end this process when Ray is shut down
        rows: Any = iter(reports.iter_rows())
        with closing(rows):
            for row in rows:
                if self.over.is_set():
                    return
                report: BatchReport = pickle.loads(row["data"])
                if report.refusal:
                    raise UserError(report.refusal)
                with self.lock:
                    if report.part is not None:
                        work.parts.add(report.part)
                        work.result.health |= report.health
                    work.result.busy += report.busy
                    work.result.waited += report.waited
                    work.advance(report.images, report.skipped)


def _left(work: FileRun, lanes: Sequence[Lane]) -> list[tuple[Lane, int]]:
    """Lanes with images that are in no part, and the first of these."""
    firsts = [(lane, work.parts.done(lane)) for lane in lanes]
    return [(lane, first) for lane, first in firsts if first < lane.stop]
