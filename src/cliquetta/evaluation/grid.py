"""Specs of runs, one per dataset, method and seed, from options or from a grid file."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.evaluation.grid_files import packaged_grid as packaged_grid
from cliquetta.methods.building.registry import method_entries
from cliquetta.methods.building.spec import MethodSpec
from cliquetta.model.names import choose_model
from cliquetta.prompts.catalogue import (
    class_names,
    list_templates,
    template_choice,
    templates,
)

BASELINE = "zero_shot"

TEXT_CAPABILITIES = frozenset({"text", "text-prompts"})
"""Capabilities of a text tower; no file of text features has them."""


@dataclass(frozen=True)
class RunSpec:
    """One cell of a grid, in plain values that can be sent to another machine."""

    dataset: str
    """an id; ``a>b>a`` for datasets in sequence, ``a+b`` where the order interleaves"""
    method: str
    model: str = "micro"  # a name or a path; the shards of one checkpoint with commas
    seed: int = 0
    """decides the order of the stream, the views and the method's own draws"""
    preset: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """config fields that differ from the preset"""
    fitted: str | None = None  # file of a few-shot method; it carries its own config
    batch_size: int = 64
    order: str = "shuffled"
    """a key of ``data.samplers.SAMPLERS``; some read the next four"""
    gamma: float = 0.1
    present: tuple[int, int] = (3, 3)
    imbalance: float = 10.0
    length: int = 10_000
    limit: int | None = None
    view_seed: int | None = None
    """``None`` takes ``seed``. One for all seeds gives an image the same views in every
    run; where pixels are held, a method that treats each image alone then predicts once
    for all."""
    templates: tuple[str, ...] | None = None  # ``None`` takes those of the dataset
    classes: tuple[str, ...] | None = None
    """in place of the dataset's; labels match by name"""
    unknown: str | None = None
    """Open set: a dataset whose classes outside the class list are mixed in, as unknown
    images; with ``classes``, images of ``dataset`` outside of that list are left
    out."""
    text_features: str | None = None
    """text embeddings by class name, if there is no tower"""
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.dataset} {self.label} seed {self.seed}"

    @property
    def label(self) -> str:
        """The method as it is written: ``NAME[:PRESET][/FIELD=VALUE]...``."""
        return str(self.method_spec)

    @property
    def method_spec(self) -> MethodSpec:
        """The method of the cell."""
        return MethodSpec(self.method, self.preset, self.options, self.fitted)


def with_spec(base: RunSpec, spec: MethodSpec) -> RunSpec:
    """Return ``base`` with another method."""
    return replace(
        base,
        method=spec.method,
        preset=spec.preset,
        options=spec.options,
        fitted=spec.fitted,
    )


def with_method(base: RunSpec, written: str) -> RunSpec:
    """Return ``base`` with a method written ``NAME[:PRESET][/FIELD=VALUE]...``."""
    return with_spec(base, MethodSpec.parse(written))


def with_options(base: RunSpec, options: Mapping[str, Any]) -> RunSpec:
    """Return ``base`` with these fields of its method's config, converted to their types."""
    return with_spec(base, base.method_spec.with_options(options))


def grid(
    cells: Sequence[RunSpec],
    *,
    datasets: Sequence[str],
    seeds: Sequence[int] = (0,),
    baseline: bool = True,
) -> list[RunSpec]:
    """Lay ``cells``, one per method, over datasets and seeds, zero-shot (``baseline``) first."""
    if baseline and cells and all(cell.method != BASELINE for cell in cells):
        cells = [zero_shot(cells[0]), *cells]
    return [
        replace(cell, dataset=dataset, seed=seed)
        for dataset, cell, seed in product(datasets, cells, seeds)
    ]


def zero_shot(spec: RunSpec) -> RunSpec:
    """Replace the method of a cell by plain CLIP."""
    return replace(spec, method=BASELINE, preset=None, options=(), fitted=None)


def read_grid(path: Path | str, *, root: str = "", **changes: Any) -> list[RunSpec]:
    """Read the runs of a grid file: JSON, a list of blocks, each a grid of its own.

    A block holds ``datasets``, ``methods`` and ``seeds``, and any field of
    :class:`RunSpec` that its runs share; one without ``datasets`` holds what the blocks
    after it have in common. Method ``*`` stands for all that need no fitting (with
    ``text_features``: and no text tower) and are not named beside it; ``limits`` has
    the most images per dataset of slow methods, by name, where 0 leaves a method out.
    ``shifts`` and ``severities`` lay every such shift over every dataset; ``role`` is
    for reports, ``note`` for readers. ``classes`` may name a class list, ``templates``
    a set, or a method whose authors chose one per dataset. ``{root}`` in a value stands
    for a folder. ``changes`` overrule the fields of all blocks.
    """
    specs: list[RunSpec] = []
    for _, datasets, block in _blocks(path, root):
        written_methods = block.pop("methods")
        seeds = block.pop("seeds", [0])
        baseline = block.pop("baseline", True)
        limits = block.pop("limits", {})
        block.pop("note", None)
        texts = block.get("templates")
        if isinstance(
            texts, str
        ):  # a name: which texts it means depends on the dataset
            del block["templates"]
        base = _base_of_block(path, datasets, block, changes)

        # Zero-shot is run beside each number of images that any method sees.
        has_text_tower = "text_features" not in block
        by_limit: dict[int | None, list[RunSpec]] = {}
        for method in _expand(written_methods, text=has_text_tower):
            cell = with_method(base, method)
            stated = (base.limit, limits.get(cell.method))
            limit = min((n for n in stated if n is not None), default=None)
            if limit != 0:
                by_limit.setdefault(limit, []).append(replace(cell, limit=limit))
        for cells in by_limit.values():
            for spec in grid(cells, datasets=datasets, seeds=seeds, baseline=baseline):
                if not isinstance(texts, str):
                    specs.append(spec)
                    continue
                # A set of templates, or a method whose authors chose one per dataset.
                is_set = texts in list_templates()
                name = texts if is_set else template_choice(texts, spec.dataset)
                specs.append(replace(spec, templates=templates(name)))
    return list(dict.fromkeys(specs))


def _base_of_block(
    path: Path | str,
    datasets: Sequence[str],
    block: dict[str, Any],
    changes: Mapping[str, Any],
) -> RunSpec:
    """Return what all runs of a block share, its fields checked."""
    # Features on both sides need no model.
    is_features = all(dataset.startswith("features:") for dataset in datasets)
    if not (is_features and "text_features" in block):
        unknown = [block["unknown"]] if "unknown" in block else []
        block["model"] = choose_model(block.get("model"), [*datasets, *unknown])
    if isinstance(block.get("classes"), str):
        block["classes"] = class_names(block["classes"])

    # JSON has lists where a run, which is a key of dictionaries, has tuples.
    names = sorted(field.name for field in fields(RunSpec))
    shared: dict[str, Any] = {}
    for name, value in {**block, **changes}.items():
        if name not in names:
            raise UnknownNameError(f"field of {path}", name, names)
        shared[name] = tuple(value) if isinstance(value, list) else value
    return RunSpec("", BASELINE, **shared)


def _expand(methods: Sequence[str], *, text: bool) -> list[str]:
    """Replace ``*`` among written methods; ``text`` says whether there is a text tower."""
    named = {re.split("[:/]", method)[0] for method in methods}
    # Methods with a setting of their own are not run again in their usual one.
    lacking = frozenset() if text else TEXT_CAPABILITIES
    others = []
    for entry in method_entries():
        able = entry.fit is None and not entry.adapter.needs & lacking
        if able and entry.name not in named:
            others.append(entry.name)
    expanded = []
    for method in methods:
        expanded += others if method == "*" else [method]
    return expanded


def shard_of(specs: Sequence[RunSpec], number: int, count: int) -> list[RunSpec]:
    """Choose the runs on every ``count``-th stream from ``number`` (1, 2 ...) on."""

    def stream(spec: RunSpec) -> tuple[Any, ...]:
        return spec.dataset, spec.order, spec.batch_size, spec.unknown

    streams = list(dict.fromkeys(map(stream, specs)))
    chosen = streams[number - 1 :: count]
    return [spec for spec in specs if stream(spec) in chosen]


def grid_roles(path: Path | str) -> dict[str, str]:
    """Read the roles of the datasets of a grid file (``report``, ``dev``, ``clean``), by id."""
    return {dataset: role for role, ids, _ in _blocks(path, ROOT) for dataset in ids}


ROOT = "{root}"


def _blocks(
    path: Path | str, root: str
) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Read role, datasets and all else of every block."""
    text = Path(path).read_text(encoding="utf-8")
    if ROOT in text and not root:
        raise UserError(f"{path} needs a folder: say where its files are with --root")
    shared: dict[str, Any] = {}
    for entry in json.loads(text.replace(ROOT, root)):
        if "datasets" not in entry:
            shared = entry
            continue
        block = {**shared, **entry}

        datasets = block.pop("datasets")
        shifts = block.pop("shifts", [])
        severities = block.pop("severities", [5])
        if shifts:
            shifted = product(datasets, severities, shifts)
            datasets = [f"{id}@{shift}:{severity}" for id, severity, shift in shifted]
        yield block.pop("role", "report"), datasets, block
