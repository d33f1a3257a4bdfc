"""Grids of runs: datasets x methods x seeds, in this process or wherever an executor sends them.

A grid is resumable because its runs are: finished ones are recognised and not run again, a
broken-off one continues from its saved state.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import Dataset
from cliquetta.data.files import Keep, RelabelledDataset
from cliquetta.data.prepared import (
    FeatureStream,
    HeldStream,
    OnPrepare,
    PixelStore,
    from_given_features,
)
from cliquetta.data.samplers import get_sampler
from cliquetta.data.stream import Stream
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.evaluation.evidence_log import EvidenceLimits
from cliquetta.evaluation.record import Record, digest
from cliquetta.evaluation.runner import Answers, AnyStream, Step, evaluate, plan
from cliquetta.methods._shared.feature_level import FeatureLevel
from cliquetta.methods._shared.fewshot_io import create_fitted, load_fitted
from cliquetta.methods.base import Adapter, BatchDependence
from cliquetta.methods.registry import create_method, list_methods, method_config
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model, pick_device
from cliquetta.model.features_only import FeaturesOnly
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.prompts.features import TextFeatures, as_text_features

BASELINE = "zero_shot"
TEXT_CAPABILITIES = frozenset({"text", "text-prompts"})
"""What a model has not whose text comes from a file of features."""
HOST_ROOM = 2**30
"""Bytes of pixels that are held in memory where there is no GPU."""


@dataclass(frozen=True)
class RunSpec:
    """One cell of a grid, in plain values that can be sent to another machine."""

    dataset: str
    """An id; ``a>b>a`` for datasets in sequence, ``a+b`` where the order interleaves them."""
    method: str
    model: str = "micro"
    """A name or a path; the shards of one checkpoint with commas."""
    seed: int = 0
    """Decides the order of the stream, the views and the method's own draws."""
    preset: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """Fields of the method's config that differ from the preset."""
    fitted: str | None = None
    """File of a few-shot method; it carries its own config."""
    batch_size: int = 64
    order: str = "shuffled"
    """A key of :data:`cliquetta.data.samplers.SAMPLERS`; some read the next four fields."""
    gamma: float = 0.1
    present: tuple[int, int] = (3, 3)
    imbalance: float = 10.0
    length: int = 10_000
    limit: int | None = None
    view_seed: int | None = None
    """``None`` takes ``seed``. One for all seeds gives an image the same views in every run;
    where pixels are held, a method that treats each image alone is then asked once for all."""
    templates: tuple[str, ...] | None = None
    """``None`` takes those of the dataset."""
    classes: tuple[str, ...] | None = None
    """Another class list than the dataset's; labels are matched by name."""
    unknown: str | None = None
    """Open set: a dataset whose classes outside the class list are mixed in, as unknown images;
    with ``classes``, images of ``dataset`` outside of that list are left out."""
    text_features: str | None = None
    """File of text embeddings by class name, where the text tower is not at hand."""
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.dataset} {self.label} seed {self.seed}"

    @property
    def label(self) -> str:
        """The method as it is written: ``NAME[:PRESET][/FIELD=VALUE]...``."""
        preset = f":{self.preset}" if self.preset else ""
        options = "".join(f"/{name}={value}" for name, value in self.options)
        return f"{self.method}{preset}{options}"


def with_method(base: RunSpec, written: str) -> RunSpec:
    """``base`` with a method as it is written, ``NAME[:PRESET][/FIELD=VALUE]...``, checked.

    Options are converted to the types of the config's fields here, once.
    """
    head, *pairs = written.split("/")
    name, _, preset = head.partition(":")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    return with_options(replace(base, method=name, preset=preset or None), options)


def with_options(base: RunSpec, options: Mapping[str, Any]) -> RunSpec:
    """``base`` with these fields of its method's config, converted to their types."""
    usual = method_config(base.method, base.preset)
    config = method_config(base.method, base.preset, options)
    values = [(f.name, getattr(config, f.name)) for f in fields(config)]
    return replace(base, options=tuple((n, v) for n, v in values if v != getattr(usual, n)))


def with_fitted(base: RunSpec, path: Path | str) -> RunSpec:
    """``base`` with the few-shot method that a file was fitted for."""
    found = load_fitted(path)
    return replace(base, method=found.method, preset=None, options=(), fitted=str(path))


def grid(
    cells: Sequence[RunSpec],
    *,
    datasets: Sequence[str],
    seeds: Sequence[int] = (0,),
    baseline: bool = True,
) -> list[RunSpec]:
    """``cells``, one per method, with every dataset and seed.

    Zero-shot is run as well and comes first, unless ``baseline`` is false: a number says little
    without the one it started from.
    """
    if baseline and cells and all(cell.method != BASELINE for cell in cells):
        cells = [zero_shot(cells[0]), *cells]
    return [
        replace(cell, dataset=dataset, seed=seed)
        for dataset, cell, seed in product(datasets, cells, seeds)
    ]


def zero_shot(spec: RunSpec) -> RunSpec:
    """The same cell with plain CLIP."""
    return replace(spec, method=BASELINE, preset=None, options=(), fitted=None)


def read_grid(path: Path | str, *, root: str = "", **changes: Any) -> list[RunSpec]:
    """The runs of a grid file: JSON, a list of blocks, each a grid of its own.

    A block holds ``datasets``, ``methods`` and ``seeds``, and any field of :class:`RunSpec` that
    its runs share; one without ``datasets`` holds what the blocks after it have in common. Method
    ``*`` stands for all that need no fitting (with ``text_features``: and no text tower) and are
    not named beside it; ``limits`` has the most images per dataset of slow methods, by name, where
    0 leaves a method out. ``shifts`` and ``severities`` lay every such shift over every dataset;
    ``role`` is for reports. ``{root}`` in a value stands for a folder. ``changes`` overrule the
    fields of all blocks.
    """
    known = {f.name for f in fields(RunSpec)}
    specs: list[RunSpec] = []
    for _, datasets, block in _blocks(path, root):
        methods = _expand(block.pop("methods"), text="text_features" not in block)
        seeds, baseline = block.pop("seeds", [0]), block.pop("baseline", True)
        limits = block.pop("limits", {})
        for name in set(block) - known:
            raise UnknownNameError(f"field of {path}", name, sorted(known))
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in {**block, **changes}.items()
        }
        base = RunSpec("", BASELINE, **plain)
        by_limit: dict[int | None, list[RunSpec]] = {}
        for cell in (with_method(base, method) for method in methods):
            known_limits = [n for n in (base.limit, limits.get(cell.method)) if n is not None]
            limit = min(known_limits, default=None)
            if limit != 0:
                by_limit.setdefault(limit, []).append(replace(cell, limit=limit))
        for cells in by_limit.values():
            specs += grid(cells, datasets=datasets, seeds=seeds, baseline=baseline)
    return list(dict.fromkeys(specs))


def _expand(methods: Sequence[str], *, text: bool) -> list[str]:
    """Methods as they are written, ``*`` replaced; ``text`` says whether there is a text tower."""
    named = {re.split("[:/]", method)[0] for method in methods}
    lacking = frozenset() if text else TEXT_CAPABILITIES
    others = [
        e.name
        for e in list_methods()
        if e.fit is None and e.name not in named and not e.adapter.needs & lacking
    ]
    return [name for method in methods for name in (others if method == "*" else [method])]


def shard_of(specs: Sequence[RunSpec], number: int, count: int) -> list[RunSpec]:
    """The runs on every ``count``-th stream from ``number`` (1, 2 ...) on."""
    streams = [(s.dataset, s.order, s.batch_size, s.unknown) for s in specs]
    chosen = set(list(dict.fromkeys(streams))[number - 1 :: count])
    return [spec for spec, stream in zip(specs, streams, strict=True) if stream in chosen]


def grid_roles(path: Path | str) -> dict[str, str]:
    """What the datasets of a grid file are for (``report``, ``dev``, ``clean``), by id."""
    return {dataset: role for role, ids, _ in _blocks(path, ROOT) for dataset in ids}


ROOT = "{root}"


def _blocks(path: Path | str, root: str) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Role, datasets and all else of every block."""
    text = Path(path).read_text(encoding="utf-8")
    if ROOT in text and not root:
        raise UserError(f"{path} needs a folder: say where its files are with --root")
    shared: dict[str, Any] = {}
    for own in json.loads(text.replace(ROOT, root)):
        if "datasets" not in own:
            shared = own
            continue
        block = {**shared, **own}
        datasets, shifts = block.pop("datasets"), block.pop("shifts", [])
        severities = block.pop("severities", [5])
        if shifts:
            datasets = [f"{d}@{s}:{n}" for d, n, s in product(datasets, severities, shifts)]
        yield block.pop("role", "report"), datasets, block


@dataclass
class RunContext:
    """Folders and device of one machine; what it has loaded serves the next run, too."""

    out: Path | None
    """Output directory; ``None`` writes nothing."""
    root: Path | None = None
    """Root directory of datasets."""
    device: str = "auto"
    workers: int = 0
    """Loader threads."""
    offline: bool = False
    features: Path | None = None
    """Folder of features encoded once; methods that need no more of an image take them from it."""
    evidence: bool = False
    """Keep what reports show (:mod:`cliquetta.evaluation.evidence_log`); needs ``out``."""
    hold: bool | None = None
    """Keep pixels and views on the device for the next run; ``None``: where a dataset of the grid
    is run more than once and there is room."""
    again: bool = False
    """Run finished cells again."""
    on_prepare: OnPrepare | None = None
    """Is told how far encoding or reading is; stays behind when the context is sent elsewhere."""
    on_download: Callable[[int, int | None], None] | None = None
    """Is told of the bytes of a checkpoint that arrive; stays behind, too."""
    _model: tuple[object, CLIP] | None = field(default=None, init=False, repr=False)
    _data: dict[str, Dataset] = field(default_factory=dict, init=False, repr=False)
    _pixels: PixelStore | None = field(default=None, init=False, repr=False)
    _answers: dict[str, Answers] = field(default_factory=dict, init=False, repr=False)
    _repeated: frozenset[str] = field(default=frozenset(), init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: the settings, not what was loaded."""
        nothing = {"on_prepare": None, "on_download": None, "_model": None, "_pixels": None}
        return {**self.__dict__, **nothing, "_data": {}, "_answers": {}}

    def expect(self, specs: Sequence[RunSpec]) -> None:
        """Note which datasets will be run more than once: they are worth holding."""
        counts = Counter(spec.dataset for spec in specs)
        self._repeated = frozenset(dataset for dataset, count in counts.items() if count > 1)

    def check(self, specs: Sequence[RunSpec]) -> None:
        """Build every method once and open every dataset once: bad names end a grid here."""
        methods = {(s.method, s.preset, s.options, s.fitted): s for s in reversed(specs)}
        datasets = {s.dataset: s for s in reversed(specs)}
        for spec in {**dict.fromkeys(methods.values()), **dict.fromkeys(datasets.values())}:
            self.prepare(spec)

    def run(self, spec: RunSpec, on_step: Callable[[Step], None] | None = None) -> Record:
        """The record of one cell: run now, continued, or found finished."""
        adapter, stream = self.prepare(spec)
        shown = self.evidence and spec.method != BASELINE  # plain CLIP has nothing to explain
        return evaluate(
            adapter,
            stream,
            out=self.out,
            preset=spec.preset,
            on_step=on_step,
            again=self.again,
            evidence=EvidenceLimits() if shown and self.out is not None else None,
            answers=None if spec.view_seed is None else self._known_answers(adapter, stream),
        )

    def prepare(self, spec: RunSpec) -> tuple[Adapter, AnyStream]:
        """The method and the stream that a spec describes."""
        text = None if spec.text_features is None else as_text_features(spec.text_features)
        domains, unknown = self._load_data(spec, None if text is None else text.names)
        given = domains[0].features([0]) is not None
        if given and text is not None:
            device = pick_device(self.device)
            model: CLIP = FeaturesOnly(text.width, scale=text.scale, device=device)
        else:
            model = self._load_model(spec)
        adapter = build_adapter(spec, model, _prompts(spec, domains[0], text))
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
            pin=model.device.type == "cuda",
        )
        if self.evidence and given:
            raise UserError(f"{stream.id} holds features, no images to show: leave out --evidence")
        if given:
            return adapter, from_given_features(stream, model)
        if self.evidence:
            return adapter, stream
        if self.features is not None and isinstance(adapter, FeatureLevel):
            return adapter, FeatureStream(stream, model, self.features, self.on_prepare)
        if self.hold or (self.hold is None and spec.dataset in self._repeated):
            if self._pixels is None:
                self._pixels = PixelStore(_room(model.device))
            if self._pixels.fits(stream, model):
                return adapter, HeldStream(stream, model, self._pixels, self.on_prepare)
            if self.hold:
                need = PixelStore.bytes_of(stream, model) / 2**30
                raise UserError(f"{stream.id} needs {need:.1f} GiB to be held: leave out --hold")
        return adapter, stream

    def _known_answers(self, adapter: Adapter, stream: AnyStream) -> Answers | None:
        """What an independent method said of the images of a held stream; of the last dataset."""
        if not isinstance(stream, HeldStream):
            return None
        if adapter.batch_dependence is not BatchDependence.INDEPENDENT:
            return None
        about = {**plan(adapter, stream).settings}
        about["stream"] = [about["stream"][name] for name in ("datasets", "views", "view_seed")]
        del about["seed"]
        key = f"{stream.id} {digest(about)}"
        self._answers = {k: v for k, v in self._answers.items() if k.startswith(f"{stream.id} ")}
        return self._answers.setdefault(key, Answers())

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
        self, spec: RunSpec, known: Sequence[str] | None = None
    ) -> tuple[list[Dataset], Dataset | None]:
        """The datasets of a stream, and that of its unknown images.

        ``known`` are class names for data that have none of their own.
        """
        ids = spec.dataset.split("+" if get_sampler(spec.order)[1].interleaves else ">")
        loaded = {id: self._open(id, spec.classes or known) for id in dict.fromkeys(ids)}
        names = spec.classes or loaded[ids[0]].names
        if spec.unknown is not None:  # images of no class need no class names of their own
            loaded[spec.unknown] = loaded.get(spec.unknown) or self._open(spec.unknown, names)
        self._data = loaded
        found = [loaded[id] for id in ids]
        if spec.classes is not None:
            keep: Keep = "all" if spec.unknown is None else "inside"
            found = [RelabelledDataset(domain, names, keep) for domain in found]
        if spec.unknown is None:
            return found, None
        return found, RelabelledDataset(loaded[spec.unknown], names, "outside")

    def _open(self, id: str, classes: Sequence[str] | None) -> Dataset:
        return self._data.get(id) or get_dataset(id, self.root, classes=classes)


def _room(device: torch.device) -> int:
    """Bytes that pixels may take."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else HOST_ROOM


def _prompts(spec: RunSpec, dataset: Dataset, text: TextFeatures | None) -> ClassPrompts:
    """The class list of a run, as text or as fixed features."""
    prompts = dataset.prompts
    texts = prompts.templates if spec.templates is None else spec.templates
    features = None if text is None else text.select(prompts.names)
    return ClassPrompts(prompts.names, texts, features, allow_duplicates=True)


def build_adapter(spec: RunSpec, model: CLIP, prompts: ClassPrompts) -> Adapter:
    """The method of a spec."""
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
    """Run all cells and return their results in the order of ``specs``; equal cells run once.

    Without an executor they are run here, one after the other; a cell that fails does not stop
    the others. ``on_step`` is for those.
    """
    found: dict[RunSpec, RunResult] = {}

    def settle(result: RunResult) -> None:
        found[result.spec] = result
        if on_result is not None:
            on_result(result)

    cells = list(dict.fromkeys(specs))
    context.expect(cells)
    if executor is not None:
        for result in executor.run(context, cells):
            settle(result)
    for spec in cells if executor is None else ():
        try:
            settle(RunResult(spec, context.run(spec, _observer(spec, on_step))))
        except Exception as error:  # a grid of a hundred runs goes on without the one that failed
            settle(RunResult(spec, error=f"{type(error).__name__}: {error}"))
    lost = "the executor returned nothing for this run"
    return [found.get(spec, RunResult(spec, error=lost)) for spec in specs]


def _observer(
    spec: RunSpec, on_step: Callable[[RunSpec, Step], None] | None
) -> Callable[[Step], None] | None:
    return None if on_step is None else lambda step: on_step(spec, step)
