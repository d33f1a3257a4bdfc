"""Prediction runs on a Ray cluster: CPU workers read and decode, actors adapt.

One Ray Data pipeline per actor: a list of batches, tasks that read them, an actor that
gets them in order. Parts are written by the process that started the run, so that they
are those of a run on one machine; an actor that dies is replaced by one that continues
after the last part.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.inference import parts as limits
from cliquetta.inference.options import PredictOptions
from cliquetta.inference.parts import Lane, Part, PartCutter
from cliquetta.inference.predictor import (
    Health,
    Predictor,
    ReadBatch,
    Reader,
    Segment,
    States,
)
from cliquetta.inference.resumable import FileRun
from cliquetta.inference.tables import Row
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.registry import create_method, get_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
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
    """What an actor reports after a batch."""

    images: int = 0
    skipped: int = 0
    busy: float = 0.0
    waited: float = 0.0
    part: Part | None = None
    health: Health = field(
        default_factory=dict
    )  # with a part: how adaptation was doing at its end
    refusal: str = ""  # why it cannot go on, if that is bad input


@dataclass(frozen=True)
class MethodParts:
    """What a method is built from, apart from the model."""

    name: str
    prompts: ClassPrompts
    config: Any
    seed: int
    fitted: Mapping[str, Tensor] | None

    @classmethod
    def of(cls, adapter: Adapter) -> "MethodParts":
        """Take a method apart; refuse one that the registry does not build."""
        if get_method(adapter.name).adapter is not type(adapter):
            raise UserError(
                f"{adapter.name} cannot be built again in an actor: run it without --ray, in "
                "parts (--shard) on several machines"
            )
        return cls(
            name=adapter.name,
            prompts=adapter.prompts,
            config=adapter.config,
            seed=adapter.seed,
            fitted=adapter.fitted,
        )

    def build(self, model: CLIP) -> Adapter:
        """Build the method for a model."""
        return create_method(
            self.name,
            model,
            self.prompts,
            self.config,
            seed=self.seed,
            fitted=self.fitted,
        )


@dataclass(frozen=True)
class ActorSetup:
    """The parts that an actor builds its methods from; the model is on the CPU."""

    options: PredictOptions
    model: CLIP
    methods: Sequence[MethodParts]
    device: str
    threads: int
    keep_state: bool
    part_rows: int
    part_seconds: float

    @classmethod
    def of(cls, work: FileRun, device: str, threads: int) -> "ActorSetup":
        """Take a run apart."""
        adapters = list(work.predictor.adapters.values())
        methods = [MethodParts.of(adapter) for adapter in adapters]
        return cls(
            options=replace(
                work.options, cluster=None
            ),  # actors know nothing of each other
            model=copy.deepcopy(adapters[0].model).cpu(),
            methods=methods,
            device=device,
            threads=threads,
            keep_state=work.state is not None,
            part_rows=limits.PART_ROWS,
            part_seconds=limits.PART_SECONDS,
        )


class PredictActor:
    """Adapts to the lanes of its track, batch after batch."""

    def __init__(self, setup: Any) -> None:
        import ray

        self.setup: ActorSetup = pickle.loads(ray.get(setup))
        torch.set_num_threads(self.setup.threads)
        model = self.setup.model.to(self.setup.device)
        adapters = {parts.name: parts.build(model) for parts in self.setup.methods}
        self.predictor = Predictor(adapters, self.setup.options)
        self.cutter: PartCutter | None = None
        self.rows: list[Row] = []  # of the part that is not finished
        self.refusal = ""
        self.free = math.nan  # since when it waits

    def __call__(self, table: Any) -> Any:
        """Predict a batch and report about it."""
        begun = time.perf_counter()
        waited = 0.0 if math.isnan(self.free) else begun - self.free
        report = None
        if not self.refusal:
            try:
                report = self._predict(from_table(table), waited)
            except UserError as error:
                self.refusal = str(
                    error
                )  # of all batches, whichever report arrives first
        report = report or BatchReport(refusal=self.refusal)
        self.free = time.perf_counter()
        return to_table(replace(report, busy=self.free - begun))

    def _predict(self, task: BatchTask, waited: float) -> BatchReport:
        if self.cutter is None or self.cutter.lane != task.lane:
            self.cutter = self._begin(task)
        assert task.first == self.cutter.next, (
            f"image {task.first} for {self.cutter.next}"
        )
        assert isinstance(task.images, ReadBatch)
        read = self.predictor.reader.develop(
            task.images, torch.device(self.setup.device)
        )
        rows = self.predictor.rows(read)
        self.rows += rows
        part = self.cutter.add(len(rows), due=task.due)
        health: Health = {}
        if part is not None:
            part = replace(part, rows=self.rows)
            health = self.predictor.health
            self.rows = []
        return BatchReport(
            images=len(rows),
            skipped=len(task.images.unreadable),
            waited=waited,
            part=part,
            health=health,
        )

    def _begin(self, task: BatchTask) -> PartCutter:
        """Continue from the states that a lane's first batch brings."""
        assert task.states is not None, "the lane began in another actor"
        self.predictor.restore(task.states)
        self.rows = []
        return PartCutter(
            self.predictor,
            task.lane,
            task.first,
            keep_state=self.setup.keep_state,
            most_rows=self.setup.part_rows,
            seconds=self.setup.part_seconds,
        )


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays: one copy instead of several."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def to_table(value: object) -> Any:
    """Make a block of Ray Data with one row: a Python object in bytes."""
    import pyarrow

    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return pyarrow.table(
        {"data": pyarrow.array([data.getvalue()], pyarrow.large_binary())}
    )


def from_table(table: Any) -> Any:
    """Return the object in a block."""
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


# batches of one pipeline: bounds the memory of the process that started the run
WINDOW = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster for :func:`cliquetta.predict` to run on (extra ``ray``)."""

    address: str = LOCAL  # `local`, `auto` (the cluster of this machine) or an address
    actors: int | None = None
    """lanes adapted to at a time; by default as many as GPUs, or one"""
    gpus_per_actor: float | None = None
    """share of a GPU; by default all of one if there is any"""
    threads: int = 1  # CPU threads, and cores, of an actor without a GPU
    retries: int = 3  # how often an actor is replaced that finished no part

    @contextmanager
    def connect(self) -> "Iterator[RayWorkers]":
        """Hold the actors for as long as a run goes on."""
        needed = (self.actors or 1) * self.threads + 1
        with connected(self.address, max(os.cpu_count() or 1, needed)) as ray:
            try:
                import ray.data
            except ImportError:
                raise UserError(
                    "--ray needs an extra: pip install 'cliquetta[ray]'"
                ) from None
            workers = self._share(ray)
            logger = logging.getLogger("ray.data")
            level = logger.level
            logger.setLevel(logging.CRITICAL)  # what goes wrong is reported here, once
            try:
                yield workers
            finally:
                logger.setLevel(level)

    def _share(self, ray: Any) -> "RayWorkers":
        """Decide how many actors there are and what each gets of the cluster."""
        resources = ray.cluster_resources()
        all_gpus = resources.get("GPU", 0.0)
        all_cores = resources.get("CPU", 0.0)
        gpus = self.gpus_per_actor
        if gpus is None:
            gpus = 1.0 if all_gpus else 0.0
        actors = self.actors
        if actors is None:
            actors = max(1, int(all_gpus / gpus)) if gpus else 1
        cores = 0 if gpus else self.threads
        if gpus * actors > all_gpus:
            there = f"a cluster with {all_gpus:.0f}: lower --actors or --gpus-per-actor"
            raise UserError(
                f"{actors} actors with {gpus} GPUs each are too many for {there}"
            )
        needed = cores * actors + 1
        if needed > all_cores:
            there = f"CPU cores, the cluster has {all_cores:.0f}: lower --actors"
            raise UserError(f"{actors} actors and a reader need {needed} {there}")
        return RayWorkers(ray, self, actors=actors, gpus=gpus, cores=cores)


def share_out(sizes: Mapping[Lane, int], tracks: int) -> list[list[Lane]]:
    """Give lanes to tracks so that all have about as many images.

    The largest lane goes first, each to the track that is emptiest then.
    """
    shares: list[list[Lane]] = [[] for _ in range(min(tracks, len(sizes)))]
    filled = [0] * len(shares)

    def largest_first(lane: Lane) -> tuple[int, int]:
        return -sizes[lane], lane.start

    for lane in sorted(sizes, key=largest_first):
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
    over: threading.Event = field(
        default_factory=threading.Event
    )  # set when the run is to end
    errors: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def predict(self, work: FileRun) -> None:
        """Predict what is in no part yet: lanes shared out among the actors, a thread for each."""
        device = "cuda" if self.gpus else "cpu"
        setup = ActorSetup.of(work, device, self.settings.threads)
        sent = self.ray.put(pickle.dumps(setup))
        sizes = {lane: lane.stop - first for lane, first in work.left(work.lanes)}
        threads = []
        for lanes in share_out(sizes, self.actors):
            arguments = (work, lanes, sent)
            thread = threading.Thread(target=self._follow, args=arguments, daemon=True)
            thread.start()
            threads.append(thread)
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
                    _log.warning(
                        "an actor is replaced: %s: %s", type(error).__name__, reason
                    )
                    self.over.wait(2.0**attempts)
        except BaseException as error:
            self.errors.append(error)
            self.over.set()

    def _tasks(self, work: FileRun, lanes: Sequence[Lane]) -> Iterator[BatchTask]:
        """Yield the next batches of the lanes."""
        size = work.options.batch_size
        number = 0
        for lane, begin in work.left(lanes):
            for first in range(begin, lane.stop, size):
                number += 1
                with self.lock:
                    segment = work.source.segment(first, min(first + size, lane.stop))
                    states = work.states(lane) if first == begin else None
                yield BatchTask(lane, first, segment, states, due=number == WINDOW)
                if number == WINDOW:
                    return

    def _stream(self, work: FileRun, lanes: Sequence[Lane], setup: Any) -> None:
        """Let batches flow through readers and an actor, and add the parts that come out."""
        from ray.data import from_arrow

        options = replace(work.options, workers=0, cluster=None)
        reader = replace(
            work.predictor.reader, options=options, device=None, model=None
        )
        batches = from_arrow([to_table(task) for task in self._tasks(work, lanes)])
        batches.context.execution_options.preserve_order = True
        batches.context.enable_progress_bars = False
        read_there: Any = read_batch
        one: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}
        read = batches.map_batches(
            read_there, fn_args=(reader, str(Path.cwd())), num_cpus=1, **one
        )
        # batches one after the other; a batch that is lost with its actor ends the
        # stream. Without restarts Ray Data waits for ever for an actor that was idle; a
        # new one lacks the states
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
        # closed here: what Ray Data left running would end this process when Ray is
        # shut down
        rows: Any = iter(reports.iter_rows())
        with closing(rows):
            for row in rows:
                if self.over.is_set():
                    return
                self._take(work, pickle.loads(row["data"]))

    def _take(self, work: FileRun, report: BatchReport) -> None:
        """Add what an actor reports to the run."""
        if report.refusal:
            raise UserError(report.refusal)
        with self.lock:
            if report.part is not None:
                work.parts.add(report.part)
                work.result.health |= report.health
            work.result.busy += report.busy
            work.result.waited += report.waited
            work.advance(report.images, report.skipped)
