"""Prediction runs on a Ray cluster: CPU workers read and decode, actors adapt.

One Ray Data pipeline per actor: a list of batches, tasks that read them, an actor that takes them
in order. Ray Data streams, holds readers back when the actor is slower, and reads again what was
lost with a worker. The parts are written by the process that started the run
(:mod:`.parts`), so that they are those of a run on one machine; an actor that dies is replaced by
one that continues after the last part.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import os
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.evaluation import parts as limits
from cliquetta.evaluation.cluster import LOCAL, connected
from cliquetta.evaluation.inference import Predictor, States
from cliquetta.evaluation.parts import Lane, Part, PartCutter
from cliquetta.evaluation.reading import ReadBatch, Reader, Segment
from cliquetta.evaluation.resumable import Work
from cliquetta.methods.registry import create_method, get_method, name_of
from cliquetta.model.clip import CLIP

WINDOW = 4096
"""Batches of one pipeline: bounds the memory of the process that started the run."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayCluster:
    """Where :func:`cliquetta.predict` runs instead of here (extra ``ray``)."""

    address: str = LOCAL
    """``local``, ``auto`` (the cluster of this machine) or an address."""
    actors: int | None = None
    """Lanes that are adapted to at the same time; by default as many as there are GPUs, or one."""
    gpus_per_actor: float | None = None
    """Share of a GPU of an actor; by default a whole one if the cluster has any, else none."""
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
            present = ray.cluster_resources()
            gpus = self._share(present.get("GPU", 0.0))
            actors = self.actors or max(1, int(present.get("GPU", 0.0) / gpus) if gpus else 1)
            cores = 0 if gpus else self.threads
            if gpus * actors > present.get("GPU", 0.0):
                raise UserError(
                    f"{actors} actors with {gpus} GPUs each are too many for a cluster with "
                    f"{present.get('GPU', 0.0):.0f}: lower --actors or --gpus-per-actor"
                )
            if cores * actors + 1 > present.get("CPU", 0.0):
                raise UserError(
                    f"{actors} actors and a reader need {cores * actors + 1} CPU cores, the "
                    f"cluster has {present.get('CPU', 0.0):.0f}: lower --actors"
                )
            logger = logging.getLogger("ray.data")
            level = logger.level
            logger.setLevel(logging.CRITICAL)  # what goes wrong is told here, once
            try:
                yield RayWorkers(ray, self, actors, gpus, cores)
            finally:
                logger.setLevel(level)

    def _share(self, present: float) -> float:
        if self.gpus_per_actor is None:
            return 1.0 if present else 0.0
        return self.gpus_per_actor


@dataclass
class RayWorkers:
    """The actors of one run."""

    ray: Any
    settings: RayCluster
    actors: int
    gpus: float
    cores: int

    def do(self, work: Work) -> None:
        """Predict what is in no part yet, lanes shared out among the actors."""
        device = "cuda" if self.gpus else "cpu"
        setup = self.ray.put(pickle.dumps(_Setup.of(work, device, self.settings.threads)))
        sizes = {lane: lane.stop - work.parts.done(lane) for lane in work.unfinished()}
        tracks = share_out(sizes, self.actors)
        over, lock = threading.Event(), threading.Lock()
        jobs = [_Track(self, work, lanes, setup, over, lock) for lanes in tracks]
        threads = [threading.Thread(target=job.run, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)  # so that Ctrl-C is noticed
        finally:
            over.set()
            for thread in threads:
                thread.join(10.0)
        for job in jobs:
            if job.error is not None:
                raise job.error


def share_out(sizes: Mapping[Lane, int], tracks: int) -> list[list[Lane]]:
    """Lanes for each track, of about the same sizes in sum: the largest first, to the emptiest."""
    found: list[list[Lane]] = [[] for _ in range(min(tracks, len(sizes)))]
    filled = [0] * len(found)
    for lane in sorted(sizes, key=lambda lane: (-sizes[lane], lane.start)):
        emptiest = filled.index(min(filled))
        found[emptiest].append(lane)
        filled[emptiest] += sizes[lane]
    return found


@dataclass
class _Track:
    """The lanes of one actor."""

    workers: RayWorkers
    work: Work
    lanes: Sequence[Lane]
    setup: Any
    over: threading.Event
    """Set when the run is to end."""
    lock: threading.Lock
    error: BaseException | None = None

    def run(self) -> None:
        """Work off the lanes; an actor that is lost is replaced."""
        attempts = 0
        try:
            while not self.over.is_set() and (left := self._left()):
                try:
                    self._stream()
                except self.workers.ray.exceptions.RayError as error:
                    if self.over.is_set():
                        return
                    attempts = attempts + 1 if self._left() == left else 0
                    if attempts > self.workers.settings.retries:
                        raise
                    reason = next(iter(str(error).splitlines()), "")
                    _log.warning("an actor is replaced: %s: %s", type(error).__name__, reason)
                    self.over.wait(2.0**attempts)
        except BaseException as error:
            self.error = error
            self.over.set()

    def _left(self) -> list[tuple[Lane, int]]:
        """Lanes with images that are in no part, and the first of these."""
        places = [(lane, self.work.parts.done(lane)) for lane in self.lanes]
        return [(lane, place) for lane, place in places if place < lane.stop]

    def _tasks(self) -> Iterator[_Task]:
        """The next batches of the lanes."""
        size = self.work.predictor.batch_size
        batches = (
            (lane, begin, first)
            for lane, begin in self._left()
            for first in range(begin, lane.stop, size)
        )
        for number, (lane, begin, first) in enumerate(islice(batches, WINDOW), start=1):
            with self.lock:
                segment = self.work.source.segment(first, min(first + size, lane.stop))
                states = self.work.states(lane) if first == begin else None
            yield _Task(lane, first, segment, states, due=number == WINDOW)

    def _stream(self) -> None:
        """Let batches flow through readers and an actor, and keep the parts that come out."""
        from ray.data import from_arrow

        reader = replace(self.work.predictor.reader, workers=0, model=None)
        batches = from_arrow([_table(task) for task in self._tasks()])
        batches.context.execution_options.preserve_order = True
        batches.context.enable_progress_bars = False
        read_there: Any = _read
        one: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}
        read = batches.map_batches(read_there, fn_args=(reader, str(Path.cwd())), num_cpus=1, **one)
        answers = read.map_batches(
            _Actor,
            fn_constructor_args=(self.setup,),
            concurrency=1,
            num_cpus=self.workers.cores,
            num_gpus=self.workers.gpus,
            ray_remote_args_fn=_in_order,
            **one,
        )
        for row in answers.iter_rows():
            if self.over.is_set():
                return
            report: _Report = pickle.loads(row["data"])
            if report.refusal:
                raise UserError(report.refusal)
            with self.lock:
                if report.part is not None:
                    self.work.parts.add(report.part)
                self.work.run.busy += report.busy
                self.work.run.waited += report.waited
                self.work.advance(report.images, report.skipped)


@dataclass(frozen=True)
class _Task:
    """A batch of a lane on its way to an actor."""

    lane: Lane
    first: int
    images: Segment | ReadBatch
    """As listed, then as read."""
    states: States | None
    """What the lane continues from, with its first batch."""
    due: bool = False
    """Whether a part must end here."""


@dataclass(frozen=True)
class _Report:
    """What an actor says after a batch."""

    images: int = 0
    skipped: int = 0
    busy: float = 0.0
    waited: float = 0.0
    part: Part | None = None
    refusal: str = ""
    """Why it cannot go on, if that is bad input."""


@dataclass(frozen=True)
class _Setup:
    """What an actor builds its methods from; the model is on the CPU."""

    predictor: Predictor
    """Without methods."""
    model: CLIP
    methods: Sequence[tuple[Any, ...]]
    """Name, prompts, config, seed and fitted tensors of each."""
    device: str
    threads: int
    keep_state: bool
    most_rows: int
    seconds: float

    @classmethod
    def of(cls, work: Work, device: str, threads: int) -> _Setup:
        """The setup of a run."""
        adapters = work.predictor.adapters.values()
        for one in adapters:
            if get_method(name_of(one)).adapter is not type(one):
                raise UserError(
                    f"{type(one).__name__} cannot be built again in an actor: run it without "
                    "--ray, in parts (--shard) on several machines"
                )
        predictor = replace(work.predictor, adapters={})
        methods = [
            (name_of(one), one.prompts, one.config, one.seed, getattr(one, "fitted", None))
            for one in adapters
        ]
        model = copy.deepcopy(next(iter(adapters)).model).cpu()
        return cls(
            predictor,
            model,
            methods,
            device,
            threads,
            work.request.state is not None,
            limits.PART_ROWS,
            limits.PART_SECONDS,
        )

    def build(self) -> Predictor:
        """The methods, in the process of the actor."""
        torch.set_num_threads(self.threads)
        model = self.model.to(self.device)
        adapters = {
            name: create_method(name, model, prompts, config, seed=seed, fitted=fitted)
            for name, prompts, config, seed, fitted in self.methods
        }
        return replace(self.predictor, adapters=adapters)


class _Actor:
    """Adapts to the lanes of its track, batch after batch."""

    def __init__(self, setup: Any) -> None:
        import ray

        self.setup: _Setup = pickle.loads(ray.get(setup))
        self.predictor = self.setup.build()
        self.cutter: PartCutter | None = None
        self.refusal = ""
        self.free = math.nan
        """Since when it waits."""

    def __call__(self, table: Any) -> Any:
        begun = time.perf_counter()
        waited = 0.0 if math.isnan(self.free) else begun - self.free
        report = _Report(refusal=self.refusal)  # to all batches, whichever report arrives first
        if not self.refusal:
            try:
                report = self._answer(_object(table), waited)
            except UserError as error:
                self.refusal = str(error)
                report = _Report(refusal=self.refusal)
        self.free = time.perf_counter()
        return _table(replace(report, busy=self.free - begun))

    def _answer(self, task: _Task, waited: float) -> _Report:
        if self.cutter is None or self.cutter.lane != task.lane:
            assert task.states is not None, "the lane began in another actor"
            self.predictor.restore(task.states)
            keep, size, seconds = self.setup.keep_state, self.setup.most_rows, self.setup.seconds
            self.cutter = PartCutter(self.predictor, task.lane, task.first, keep, size, seconds)
        assert task.first == self.cutter.next, f"image {task.first} for {self.cutter.next}"
        assert isinstance(task.images, ReadBatch)
        rows = self.predictor.rows(task.images)
        part = self.cutter.add(rows, due=task.due)
        return _Report(len(rows), len(task.images.unreadable), waited=waited, part=part)


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays: one copy instead of several."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _in_order() -> dict[str, Any]:
    """Actor options: batches one after the other; one that is lost is replaced by the run."""
    return {"max_restarts": 0, "allow_out_of_order_execution": False}


def _table(value: object) -> Any:
    """A block of Ray Data with one row: a Python object in bytes."""
    import pyarrow

    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return pyarrow.table({"data": pyarrow.array([data.getvalue()], pyarrow.large_binary())})


def _object(table: Any) -> Any:
    return pickle.loads(table["data"][0].as_buffer())


def _read(table: Any, reader: Reader, folder: str) -> Any:
    """Read and decode a batch, in a task of its own."""
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # paths were given as seen from there
        os.chdir(folder)
    task: _Task = _object(table)
    assert isinstance(task.images, tuple)
    (read,) = reader.read(task.images)
    return _table(replace(task, images=read))
