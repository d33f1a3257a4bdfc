"""Grids of runs, here or wherever an executor sends them; resumable because runs are."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from cliquetta.data import prepared
from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import Dataset
from cliquetta.data.files import Keep, RelabelledDataset
from cliquetta.data.samplers import SAMPLERS
from cliquetta.data.stream import Stream
from cliquetta.errors import UserError, look_up
from cliquetta.evaluation.evidence_log import EvidenceLimits
from cliquetta.evaluation.grid import BASELINE, RunSpec
from cliquetta.evaluation.progress import Step
from cliquetta.evaluation.record import Record, digest, plan
from cliquetta.evaluation.runner import PredictionCache, evaluate
from cliquetta.methods.building.base import Adapter, BatchDependence
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model, pick_device
from cliquetta.model.wrapped import FeaturesOnly
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.prompts.features import as_text_features

HOST_ROOM = 2**30  # bytes of pixels that are held in memory where there is no GPU


@dataclass
class RunContext:
    """Folders and device of one machine; what it has loaded serves the next run, too."""

    out: Path | None  # output directory; ``None`` writes nothing
    root: Path | None = None
    device: str = "auto"
    workers: int | None = 0
    """of the loader: 0 reads in the caller's thread, ``None`` chooses"""
    offline: bool = False
    features: Path | None = None
    """features encoded once, for methods that need no more of an image"""
    evidence: bool = False  # keep what reports show (``evidence_log``); needs ``out``
    hold: bool | None = None
    """Keep pixels and views on the device for the next run; ``None``: where a dataset
    of the grid is run more than once and there is room."""
    again: bool = False
    recorded: Callable[[Record], Record | None] | None = None
    """finds a run recorded elsewhere"""
    on_prepare: prepared.OnPrepare | None = None
    """encoding or reading proceeds; not sent elsewhere"""
    on_download: Callable[[int, int | None], None] | None = None
    """bytes have arrived; not sent"""
    _model: tuple[object, CLIP] | None = field(default=None, init=False, repr=False)
    _data: dict[str, Dataset] = field(default_factory=dict, init=False, repr=False)
    _pixels: prepared.PixelStore | None = field(default=None, init=False, repr=False)
    _cached: dict[str, PredictionCache] = field(
        default_factory=dict, init=False, repr=False
    )
    _repeated: frozenset[str] = field(default=frozenset(), init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Send settings to another process, not what was loaded."""
        local = ("on_prepare", "on_download", "recorded", "_model", "_pixels")
        return {**self.__dict__, **dict.fromkeys(local), "_data": {}, "_cached": {}}

    def expect(self, specs: Sequence[RunSpec]) -> None:
        """Note which datasets will be run more than once: they are worth holding."""
        counts = Counter(spec.dataset for spec in specs)
        self._repeated = frozenset(
            dataset for dataset, count in counts.items() if count > 1
        )

    def check(self, specs: Sequence[RunSpec]) -> None:
        """Build every method once and open every dataset once: bad names end a grid here."""
        methods = {}
        datasets = {}
        for spec in reversed(specs):
            methods[spec.method, spec.preset, spec.options, spec.fitted] = spec
            datasets[spec.dataset] = spec
        for spec in dict.fromkeys([*methods.values(), *datasets.values()]):
            self.prepare(spec)

    def run(
        self, spec: RunSpec, on_step: Callable[[Step], None] | None = None
    ) -> Record:
        """Run one cell, or continue it, or find it finished; return its record."""
        adapter, stream = self.prepare(spec)
        if self.recorded is not None:
            as_run = prepared.from_given_features(stream, adapter.model)
            record = self.recorded(plan(adapter, as_run, spec.preset))
            if record is not None:
                return record
        # plain CLIP has nothing to explain
        explained = self.evidence and spec.method != BASELINE and self.out is not None
        return evaluate(
            adapter,
            stream,
            out=self.out,
            preset=spec.preset,
            on_step=on_step,
            again=self.again,
            evidence=EvidenceLimits() if explained else None,
            cache=None if spec.view_seed is None else self._cache(adapter, stream),
        )

    def prepare(self, spec: RunSpec) -> tuple[Adapter, prepared.AnyStream]:
        """Build the method and the stream that a spec describes."""
        text = (
            None if spec.text_features is None else as_text_features(spec.text_features)
        )
        domains, unknown = self._load_data(spec, None if text is None else text.names)
        has_features = domains[0].features([0]) is not None
        if has_features and text is not None:
            device = pick_device(self.device)
            model: CLIP = FeaturesOnly(text.width, scale=text.scale, device=device)
        else:
            model = self._load_model(spec)
        names = domains[0].names
        templates = domains[0].templates if spec.templates is None else spec.templates
        features = None if text is None else text.select(names)
        prompts = ClassPrompts(names, templates, features, allow_duplicates=True)

        adapter = spec.method_spec.build(model, prompts, seed=spec.seed)
        stream = Stream(
            domains,
            model.preprocess,
            spec.batch_size,
            order=spec.order,
            seed=spec.seed,
            views=adapter.views,
            view_seed=spec.seed if spec.view_seed is None else spec.view_seed,
            gamma=spec.gamma,
            present=spec.present,
            imbalance=spec.imbalance,
            length=spec.length,
            limit=spec.limit,
            unknown=unknown,
            workers=self.workers,
            device=model.device,
        )
        if has_features:
            if self.evidence:
                reason = "holds features, no images to show: leave out --evidence"
                raise UserError(f"{stream.id} {reason}")
            return adapter, prepared.from_given_features(stream, model)
        if self.evidence:
            return adapter, stream
        # Features on disk are read instead of images, where a method needs no more.
        if self.features is not None and isinstance(adapter, FeatureLevel):
            return adapter, prepared.FeatureStream(
                stream, model, self.features, self.on_prepare
            )
        if self.hold or (self.hold is None and spec.dataset in self._repeated):
            return adapter, self._hold_pixels(stream, model)
        return adapter, stream

    def _hold_pixels(self, stream: Stream, model: CLIP) -> prepared.AnyStream:
        """Keep a stream's pixels on the device for other runs, where there is room."""
        if self._pixels is None:
            room = HOST_ROOM
            if model.device.type == "cuda":
                free, _ = torch.cuda.mem_get_info(model.device)
                room = free // 2
            self._pixels = prepared.PixelStore(room)
        if self._pixels.fits(stream, model):
            return prepared.HeldStream(stream, model, self._pixels, self.on_prepare)
        if self.hold:
            need = prepared.PixelStore.bytes_of(stream, model) / 2**30
            raise UserError(
                f"{stream.id} needs {need:.1f} GiB to be held: leave out --hold"
            )
        return stream

    def _cache(
        self, adapter: Adapter, stream: prepared.AnyStream
    ) -> PredictionCache | None:
        """Return predictions of an independent method on a held stream; of the last dataset."""
        independent = adapter.batch_dependence is BatchDependence.INDEPENDENT
        if not isinstance(stream, prepared.HeldStream) or not independent:
            return None
        # Neither the seed nor the order matters to such a prediction.
        about = {**plan(adapter, stream).settings}
        settings = about["stream"]
        about["stream"] = [
            settings[name] for name in ("datasets", "views", "view_seed")
        ]
        del about["seed"]

        start = f"{stream.id} "
        for key in list(self._cached):
            if not key.startswith(start):
                del self._cached[key]
        return self._cached.setdefault(start + digest(about), PredictionCache())

    def _load_model(self, spec: RunSpec) -> CLIP:
        key = (spec.model, spec.dtype)
        if self._model is None or self._model[0] != key:
            self._model = None  # let go of the old one before the new one is loaded
            shards = spec.model.split(",")
            model = create_model(
                spec.model if len(shards) == 1 else shards,
                device=self.device,
                dtype=spec.dtype,
                offline=self.offline,
                on_progress=self.on_download,
            )
            self._model = (key, model)
        return self._model[1]

    def _load_data(
        self, spec: RunSpec, class_names: Sequence[str] | None = None
    ) -> tuple[list[Dataset], Dataset | None]:
        """Load the datasets of a stream, and of its unknown images, by ``class_names``."""
        order = look_up("order", spec.order, SAMPLERS)
        ids = spec.dataset.split("+" if order.interleaves else ">")
        loaded = {
            id: self._open(id, spec.classes or class_names) for id in dict.fromkeys(ids)
        }
        names = spec.classes or loaded[ids[0]].names
        if spec.unknown is not None and spec.unknown not in loaded:
            # Images of no class need no class names of their own.
            loaded[spec.unknown] = self._open(spec.unknown, names)
        self._data = loaded
        domains = [loaded[id] for id in ids]
        if spec.classes is not None:
            keep: Keep = "all" if spec.unknown is None else "inside"
            domains = [RelabelledDataset(domain, names, keep) for domain in domains]
        if spec.unknown is None:
            return domains, None
        return domains, RelabelledDataset(loaded[spec.unknown], names, "outside")

    def _open(self, id: str, classes: Sequence[str] | None) -> Dataset:
        return self._data.get(id) or get_dataset(id, self.root, classes=classes)


@dataclass(frozen=True)
class RunResult:
    """The outcome of a cell: a record, or an error."""

    spec: RunSpec
    record: Record | None = None
    error: str = ""


class Executor(Protocol):
    """Runs cells somewhere else; yields one result per cell, in any order."""

    def run(self, context: RunContext, specs: Sequence[RunSpec]) -> Iterator[RunResult]:
        """Run all of ``specs``; a cell that fails must not stop the others."""
        ...


def sweep(
    specs: Sequence[RunSpec],
    context: RunContext,
    executor: Executor | None = None,
    *,
    on_step: Callable[[RunSpec, Step], None] | None = None,
    on_result: Callable[[RunResult], None] | None = None,
) -> list[RunResult]:
    """Run equal cells once; results in the order of ``specs``. Failures stop no other cells."""
    results: dict[RunSpec, RunResult] = {}

    def settle(result: RunResult) -> None:
        results[result.spec] = result
        if on_result is not None:
            on_result(result)

    cells = list(dict.fromkeys(specs))
    context.expect(cells)
    if executor is not None:
        for result in executor.run(context, cells):
            settle(result)
    for spec in cells if executor is None else ():
        try:
            observe = None if on_step is None else partial(on_step, spec)
            settle(RunResult(spec, context.run(spec, observe)))
        except Exception as error:
            # A grid of a hundred runs goes on without the one that failed.
            settle(RunResult(spec, error=f"{type(error).__name__}: {error}"))
    lost = "the executor returned nothing for this run"
    return [results.get(spec, RunResult(spec, error=lost)) for spec in specs]
