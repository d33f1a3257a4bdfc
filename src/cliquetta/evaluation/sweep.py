"""Grids of runs: data sets x methods x seeds, in this process or wherever an executor sends them.

A grid is resumable because its runs are: finished ones are recognised and not run again, a
broken-off one continues from its saved state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import Dataset
from cliquetta.data.prepared import FeatureStream, OnEncode
from cliquetta.data.samplers import get_sampler
from cliquetta.data.stream import Stream
from cliquetta.evaluation.evidence_log import evaluate_with_evidence
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.runner import Step, evaluate
from cliquetta.methods._shared.feature_level import FeatureLevel
from cliquetta.methods._shared.fewshot_io import create_fitted
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import create_method, method_config
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts

BASELINE = "zero_shot"


@dataclass(frozen=True)
class RunSpec:
    """One cell of a grid, in plain values that can be sent to another machine."""

    dataset: str
    """An id; ``a>b>a`` for data sets in sequence, ``a+b`` with ``order="mixed"``."""
    method: str
    model: str = "micro"
    seed: int = 0
    """Decides the order of the stream, the views and the method's own draws."""
    preset: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """Fields of the method's config that differ from the preset."""
    fitted: str | None = None
    """File of a few-shot method; it carries its own config."""
    batch_size: int = 64
    order: str = "shuffled"
    """A key of :data:`cliquetta.data.samplers.SAMPLERS`; some read the next three fields."""
    gamma: float = 0.1
    present: tuple[int, int] = (3, 3)
    length: int = 10_000
    limit: int | None = None
    templates: tuple[str, ...] | None = None
    """``None`` takes those of the data set."""
    dtype: str = "float32"

    def __str__(self) -> str:
        preset = f":{self.preset}" if self.preset else ""
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"{self.dataset} {self.method}{preset}{options} seed {self.seed}"


def grid(
    base: RunSpec,
    *,
    datasets: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int] = (0,),
    baseline: bool = True,
) -> list[RunSpec]:
    """``base`` with every data set, method and seed; ``method:preset`` names a preset.

    Zero-shot is run as well and comes first, unless ``baseline`` is false: a number says little
    without the one it started from.
    """
    wanted = [BASELINE] if baseline and BASELINE not in methods else []
    cells = []
    for dataset in datasets:
        for method in [*wanted, *methods]:
            name, _, preset = method.partition(":")
            own = name == base.method
            method_config(name, preset or None)  # an unknown name is refused before the first run
            cells += [
                replace(
                    base,
                    dataset=dataset,
                    method=name,
                    preset=preset or (base.preset if own else None),
                    options=base.options if own else (),
                    fitted=base.fitted if own else None,
                    seed=seed,
                )
                for seed in seeds
            ]
    return cells


@dataclass
class RunContext:
    """Folders and device of one machine; keeps the last model and data set for the next run."""

    out: Path | None
    """Folder of runs; ``None`` writes nothing."""
    root: Path | None = None
    """Folder in which data sets lie."""
    device: str = "auto"
    workers: int = 0
    """Loader threads."""
    offline: bool = False
    features: Path | None = None
    """Folder of features encoded once; methods that need no more of an image take them from it."""
    evidence: bool = False
    """Keep what reports show (:mod:`cliquetta.evaluation.evidence_log`); needs ``out``."""
    on_encode: OnEncode | None = None
    """Is told how far encoding is; stays behind when the context is sent elsewhere."""
    _model: tuple[object, CLIP] | None = field(default=None, init=False, repr=False)
    _data: dict[str, Dataset] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: the settings, not what was loaded."""
        return {**self.__dict__, "on_encode": None, "_model": None, "_data": {}}

    def run(self, spec: RunSpec, on_step: Callable[[Step], None] | None = None) -> Record:
        """The record of one cell: run now, continued, or found finished."""
        adapter, stream = self.prepare(spec)
        shown = self.evidence and spec.method != BASELINE  # plain CLIP has nothing to explain
        if shown and self.out is not None and isinstance(stream, Stream):
            return evaluate_with_evidence(
                adapter, stream, out=self.out, preset=spec.preset, on_step=on_step
            )
        return evaluate(adapter, stream, out=self.out, preset=spec.preset, on_step=on_step)

    def prepare(self, spec: RunSpec) -> tuple[Adapter, Stream | FeatureStream]:
        """The method and the stream that a spec describes."""
        model = self._load_model(spec)
        domains = self._load_data(spec)
        prompts = domains[0].prompts
        if spec.templates is not None:
            prompts = ClassPrompts(prompts.names, spec.templates, allow_duplicates=True)
        adapter = _adapter(spec, model, prompts)
        stream = Stream(
            domains,
            model.preprocess,
            spec.batch_size,
            order=spec.order,
            seed=spec.seed,
            views=adapter.views,
            view_seed=spec.seed,
            gamma=spec.gamma,
            present=spec.present,
            length=spec.length,
            limit=spec.limit,
            workers=self.workers,
            pin=model.device.type == "cuda",
        )
        if self.features is not None and not self.evidence and isinstance(adapter, FeatureLevel):
            kept = FeatureStream(stream, model, self.features, on_encode=self.on_encode)
            return adapter, kept
        return adapter, stream

    def _load_model(self, spec: RunSpec) -> CLIP:
        key = (spec.model, spec.dtype)
        if self._model is None or self._model[0] != key:
            self._model = None  # let go of the old one before the new one is loaded
            model = create_model(
                spec.model, device=self.device, dtype=spec.dtype, offline=self.offline
            )
            self._model = (key, model)
        return self._model[1]

    def _load_data(self, spec: RunSpec) -> list[Dataset]:
        ids = spec.dataset.split("+" if get_sampler(spec.order)[1].interleaves else ">")
        self._data = {
            id: self._data[id] if id in self._data else get_dataset(id, self.root)
            for id in dict.fromkeys(ids)
        }
        return [self._data[id] for id in ids]


def _adapter(spec: RunSpec, model: CLIP, prompts: ClassPrompts) -> Adapter:
    if spec.fitted is not None:
        return create_fitted(spec.fitted, model, prompts, seed=spec.seed)
    config = method_config(spec.method, spec.preset, dict(spec.options))
    return create_method(spec.method, model, prompts, config, seed=spec.seed)


@dataclass(frozen=True)
class RunResult:
    """How a cell ended: with a record, or with what went wrong."""

    spec: RunSpec
    record: Record | None = None
    error: str = ""


class Executor(Protocol):
    """Runs cells somewhere; yields one result per cell, in any order."""

    def run(self, context: RunContext, specs: Sequence[RunSpec]) -> Iterator[RunResult]:
        """Run all of ``specs``; a cell that fails must not stop the others."""
        ...


@dataclass
class SerialExecutor:
    """Everything in this process, cell after cell."""

    on_step: Callable[[RunSpec, Step], None] | None = None

    def run(self, context: RunContext, specs: Sequence[RunSpec]) -> Iterator[RunResult]:
        """Run ``specs`` in order."""
        for spec in specs:
            yield run_cell(context, spec, self.on_step)


def run_cell(
    context: RunContext, spec: RunSpec, on_step: Callable[[RunSpec, Step], None] | None = None
) -> RunResult:
    """One cell, its failure turned into an result."""
    observe = None if on_step is None else lambda step: on_step(spec, step)
    try:
        return RunResult(spec, context.run(spec, observe))
    except Exception as error:  # a grid of a hundred runs goes on without the one that failed
        return RunResult(spec, error=f"{type(error).__name__}: {error}")


def sweep(
    specs: Sequence[RunSpec],
    context: RunContext,
    executor: Executor | None = None,
    *,
    on_result: Callable[[RunResult], None] | None = None,
) -> list[RunResult]:
    """Run all cells and return their results in the order of ``specs``; equal cells run once."""
    executor = SerialExecutor() if executor is None else executor
    found: dict[RunSpec, RunResult] = {}
    for result in executor.run(context, list(dict.fromkeys(specs))):
        found[result.spec] = result
        if on_result is not None:
            on_result(result)
    lost = "the executor returned nothing for this run"
    return [found.get(spec, RunResult(spec, error=lost)) for spec in specs]
