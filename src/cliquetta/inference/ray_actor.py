"""Prediction on a Ray cluster: tasks that read batches, actors that adapt.

Batches, and what an actor reports about each, travel as tables of one row: an object in bytes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.inference import parts as limits
from cliquetta.inference.parts import Lane, Part, PartCutter
from cliquetta.inference.predictor import Health, Predictor, States
from cliquetta.inference.reading import ReadBatch, Reader, Segment
from cliquetta.inference.resumable import FileRun
from cliquetta.inference.table_files import Row
from cliquetta.methods.registry import create_method, get_method
from cliquetta.model.clip import CLIP


@dataclass(frozen=True)
class BatchTask:
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
class BatchReport:
    """The report of an actor after a batch."""

    images: int = 0
    skipped: int = 0
    busy: float = 0.0
    waited: float = 0.0
    part: Part | None = None
    health: Health = field(default_factory=dict)
    """With a part: how adaptation was doing at its end."""
    refusal: str = ""
    """Why it cannot go on, if that is bad input."""


@dataclass(frozen=True)
class ActorSetup:
    """The parts that an actor builds its methods from; the model is on the CPU."""

    predictor: Predictor
    """Without methods."""
    model: CLIP
    methods: Sequence[tuple[Any, ...]]
    """Name, prompts, config, seed and fitted tensors of each."""
    device: str
    threads: int
    cutting: tuple[bool, int, float]
    """The last three settings of a :class:`PartCutter`."""

    @classmethod
    def of(cls, work: FileRun, device: str, threads: int) -> ActorSetup:
        """The setup of a run."""
        adapters = work.predictor.adapters.values()
        for one in adapters:
            if get_method(one.name).adapter is not type(one):
                raise UserError(
                    f"{one.name} cannot be built again in an actor: run it without "
                    "--ray, in parts (--shard) on several machines"
                )
        predictor = replace(work.predictor, adapters={})
        methods = [(one.name, one.prompts, one.config, one.seed, one.fitted) for one in adapters]
        model = copy.deepcopy(next(iter(adapters)).model).cpu()
        cutting = work.state is not None, limits.PART_ROWS, limits.PART_SECONDS
        return cls(predictor, model, methods, device, threads, cutting)

    def build(self) -> Predictor:
        """The methods, in the process of the actor."""
        torch.set_num_threads(self.threads)
        model = self.model.to(self.device)
        adapters = {
            name: create_method(name, model, prompts, config, seed=seed, fitted=fitted)
            for name, prompts, config, seed, fitted in self.methods
        }
        return replace(self.predictor, adapters=adapters)


class PredictActor:
    """Adapts to the lanes of its track, batch after batch."""

    def __init__(self, setup: Any) -> None:
        import ray

        self.setup: ActorSetup = pickle.loads(ray.get(setup))
        self.predictor = self.setup.build()
        self.cutter: PartCutter | None = None
        self.rows: list[Row] = []
        """Of the part that is not finished."""
        self.refusal = ""
        self.free = math.nan
        """Since when it waits."""

    def __call__(self, table: Any) -> Any:
        """The report about a batch."""
        begun = time.perf_counter()
        waited = 0.0 if math.isnan(self.free) else begun - self.free
        report = BatchReport(refusal=self.refusal)  # to all batches, whichever report arrives first
        if not self.refusal:
            try:
                report = self._predict(from_table(table), waited)
            except UserError as error:
                self.refusal = str(error)
                report = BatchReport(refusal=self.refusal)
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
    with contextlib.suppress(OSError):  # paths were given as seen from there
        os.chdir(folder)
    task: BatchTask = from_table(table)
    assert isinstance(task.images, Segment)
    return to_table(replace(task, images=reader.read(task.images)))
