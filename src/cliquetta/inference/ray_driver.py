"""Prediction runs on a Ray cluster: CPU workers read and decode, actors adapt.

One Ray Data pipeline per actor: a list of batches, tasks that read them, an actor that gets them in
order. Parts are written by the process that started the run, so that they are those of a run on one
machine; an actor that dies is replaced by one that continues after the last part.
"""

import copy
import io
import logging
import math
import os
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.inference import parts as limits
from cliquetta.inference.parts import Lane, Part, PartCutter
from cliquetta.inference.predictor import Health, Predictor, ReadBatch, Reader, Segment, States
from cliquetta.inference.resumable import FileRun
from cliquetta.inference.tables import Row
from cliquetta.methods.registry import create_method, get_method
from cliquetta.model.clip import CLIP
from cliquetta.ray_connection import LOCAL, connected


@dataclass(frozen=True)
class BatchTask:
    """A batch of a lane on its way to an actor."""

    lane: Lane
    first: int
    images: Segment | ReadBatch  # as listed, then as read
    states: States | None  # what the lane continues from, with its first batch
    due: bool = False  # whether a part must end here


@dataclass(frozen=True)
class BatchReport:
    """The report of an actor after a batch."""

    images: int = 0
    skipped: int = 0
    busy: float = 0.0
    waited: float = 0.0
    part: Part | None = None
    health: Health = field(default_factory=dict)  # with a part: how adaptation was doing at its end
    refusal: str = ""  # why it cannot go on, if that is bad input


@dataclass(frozen=True)
class ActorSetup:
    """The parts that an actor builds its methods from; the model is on the CPU."""

    predictor: Predictor  # without methods
    model: CLIP
    methods: Sequence[tuple[Any, ...]]  # name, prompts, config, seed and fitted tensors of each
    device: str
    threads: int
    cutting: tuple[bool, int, float]  # the last three settings of a `PartCutter`

    @classmethod
    def of(cls, work: FileRun, device: str, threads: int) -> "ActorSetup":
        """The setup of a run."""
        adapters = work.predictor.adapters.values()
        for one in adapters:
            if get_method(one.name).adapter is not type(one):
                remedy = "run it without --ray, in parts (--shard) on several machines"
                raise UserError(f"{one.name} cannot be built again in an actor: {remedy}")
        options = replace(work.options, cluster=None)  # actors need not know of each other
        predictor = replace(work.predictor, adapters={}, options=options)
        methods = [(one.name, one.prompts, one.config, one.seed, one.fitted) for one in adapters]
        model = copy.deepcopy(next(iter(adapters)).model).cpu()
        cutting = work.state is not None, limits.PART_ROWS, limits.PART_SECONDS
        return cls(predictor, model, methods, device, threads, cutting)


class PredictActor:
    """Adapts to the lanes of its track, batch after batch."""

    def __init__(self, setup: Any) -> None:
        import ray

        self.setup: ActorSetup = pickle.loads(ray.get(setup))
        torch.set_num_threads(self.setup.threads)
        model = self.setup.model.to(self.setup.device)
        adapters = {
            name: create_method(name, model, prompts, config, seed=seed, fitted=fitted)
            for name, prompts, config, seed, fitted in self.setup.methods
        }
        self.predictor = replace(self.setup.predictor, adapters=adapters)
        self.cutter: PartCutter | None = None
        self.rows: list[Row] = []  # of the part that is not finished
        self.refusal = ""
        self.free = math.nan  # since when it waits

    def __call__(self, table: Any) -> Any:
        """The report about a batch."""
        begun = time.perf_counter()
        waited = 0.0 if math.isnan(self.free) else begun - self.free
        report = None
        if not self.refusal:
            try:
                report = self._predict(from_table(table), waited)
            except UserError as error:
                self.refusal = str(error)  # of all batches, whichever report arrives first
        report = report or BatchReport(refusal=self.refusal)
        self.free = time.perf_counter()
        return to_table(replace(report, busy=self.free - begun))

    def _predict(self, task: BatchTask, waited: float) -> BatchReport:
        if self.cutter is None or self.cutter.lane != task.lane:
            assert task.states is not None, "the lane began in another actor"
            self.predictor.restore(task.states)
            self.rows = []
            cutting = self.setup.cutting
            self.cutter = PartCutter(self.predictor, task.lane, task.first, *cutting)
        assert task.first == self.cutter.next, f"image {task.first} for {self.cutter.next}"
        assert isinstance(task.images, ReadBatch)
        read = self.predictor.reader.develop(task.images, torch.device(self.setup.device))
        rows = self.predictor.rows(read)
        self.rows += rows
        part = self.cutter.add(len(rows), due=task.due)
        if part is not None:
            part, self.rows = replace(part, rows=self.rows), []
        health = {} if part is None else self.predictor.health
        return BatchReport(len(rows), len(task.images.unreadable), 0.0, waited, part, health)


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays: one copy instead of several."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def to_table(value: object) -> Any:
    """A block of Ray Data with one row: a Python object in bytes."""
    import pyarrow

    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return pyarrow.table({"data": pyarrow.array([data.getvalue()], pyarrow.large_binary())})


def from_table(table: Any) -> Any:
    """The object in a block."""
    return pickle.loads(table["data"][0].as_buffer())


def read_batch(table: Any, reader: Reader, folder: str) -> Any:
    """Read and decode a batch, in a task of its own."""
    torch.set_num_threads(1)
    with suppress(OSError):  # paths were given as seen from there
        os.chdir(folder)
    task: BatchTask = from_table(table)
    assert isinstance(task.images, Segment)
    return to_table(replace(task, images=reader.read(task.images)))


# --- from here on the process that started the run ------------------------------------------------


WINDOW = 4096  # batches of one pipeline: bounds the memory of the process that started the run

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster for :func:`cliquetta.predict` to run on (extra ``ray``)."""

    address: str = LOCAL  # `local`, `auto` (the cluster of this machine) or an address
    actors: int | None = None  # lanes adapted to at a time; by default as many as GPUs, or one
    gpus_per_actor: float | None = None  # share of a GPU; by default all of one if there is any
    threads: int = 1  # CPU threads, and cores, of an actor without a GPU
    retries: int = 3  # how often an actor is replaced that finished no part

    @contextmanager
    def connect(self) -> "Iterator[RayWorkers]":
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
                there = f"a cluster with {has['GPU']:.0f}: lower --actors or --gpus-per-actor"
                raise UserError(f"{actors} actors with {gpus} GPUs each are too many for {there}")
            if cores * actors + 1 > has["CPU"]:
                there = f"CPU cores, the cluster has {has['CPU']:.0f}: lower --actors"
                raise UserError(f"{actors} actors and a reader need {cores * actors + 1} {there}")
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
    over: threading.Event = field(default_factory=threading.Event)  # set when the run is to end
    errors: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def predict(self, work: FileRun) -> None:
        """Predict what is in no part yet: lanes shared out among the actors, a thread for each."""
        device = "cuda" if self.gpus else "cpu"
        setup = self.ray.put(pickle.dumps(ActorSetup.of(work, device, self.settings.threads)))
        sizes = {lane: lane.stop - first for lane, first in work.left(work.lanes)}
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
            while not self.over.is_set() and (left := work.left(lanes)):
                try:
                    self._stream(work, lanes, setup)
                except self.ray.exceptions.RayError as error:
                    if self.over.is_set():
                        return
                    attempts = attempts + 1 if work.left(lanes) == left else 0
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
        size = work.options.batch_size
        batches = (
            (lane, begin, first)
            for lane, begin in work.left(lanes)
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

        options = replace(work.options, workers=0, cluster=None)
        reader = replace(work.predictor.reader, options=options, device=None, model=None)
        batches = from_arrow([to_table(task) for task in self._tasks(work, lanes)])
        batches.context.execution_options.preserve_order = True
        batches.context.enable_progress_bars = False
        read_there: Any = read_batch
        one: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}
        read = batches.map_batches(read_there, fn_args=(reader, str(Path.cwd())), num_cpus=1, **one)
        # batches one after the other; a batch that is lost with its actor ends the stream. Without
        # restarts Ray Data waits for ever for an actor that was idle; a new one lacks the states
        actor_options = {
            "max_restarts": -1,
            "max_task_retries": 0,
            "allow_out_of_order_execution": False,
        }
        reports = read.map_batches(
            PredictActor,
            fn_constructor_args=(setup,),
            concurrency=1,
            num_cpus=self.cores,
            num_gpus=self.gpus,
            ray_remote_args_fn=lambda: actor_options,
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
