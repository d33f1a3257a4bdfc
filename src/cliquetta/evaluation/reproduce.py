"""The paper's tables with our numbers beside the printed ones, and what keeps the two apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from cliquetta.data.catalogue import get_dataset
from cliquetta.errors import UnknownNameError
from cliquetta.evaluation.ablation import BATCH_SIZE, Ablation, ablation
from cliquetta.evaluation.grid import RunSpec, zero_shot
from cliquetta.evaluation.published import (
    PublishedRow,
    PublishedTable,
    Side,
    our_side,
    published_side,
    reasons,
)
from cliquetta.evaluation.record import Record
from cliquetta.evaluation.sweep import RunResult
from cliquetta.methods.registry import get_method

GRIDS = {
    "headline": ("bundled", "real"),
    "methods": ("bundled", "methods", "real", "streams", "streams-real"),
    "ablation": ("ablation", "ablation-real"),
    "leaderboard": ("leaderboard", "leaderboard-real"),
}
"""Pages of our own results, and the grids whose records they are written from."""
STAND_IN = "bundled"
"""Takes the place of the paper's datasets where there are none."""
SHIFT = "contrast:4"
"""Of the stand-in, unless another is asked for; its cliques are small, so that it is quick."""
STAND_IN_IMAGES = {"components": 768, "combination": 512, "batch-size": 256, "hyperparameters": 192}
"""Images of the stand-in, so that two CPU cores need minutes; 64 for tables of many methods."""
FEW_IMAGES = 64
VALUES: dict[str, tuple[float, ...]] = {
    "threshold": (0.6, 0.65, 0.7, 0.8, 0.9),
    "concentration": (0.0, 0.5, 1.0, 2.0),
    "capacity": (2, 4, 6, 10),
    "neighbours": (1, 2, 3, 5),
    BATCH_SIZE: (8, 16, 32, 64, 128),
}
"""Where we measure: the paper's figures do not print their values."""


@dataclass(frozen=True)
class Setting:
    """Where and with what a table is run."""

    base: RunSpec
    """Model, batch size, limit and the like; dataset and method are filled in."""
    root: Path | None = None
    shift: str | None = None
    seeds: tuple[int, ...] = (0,)
    fitted: Mapping[str, str] = field(default_factory=dict)
    """Files of few-shot methods, by method."""

    @property
    def is_stand_in(self) -> bool:
        """Whether the bundled images take the place of the paper's datasets."""
        return self.root is None

    def dataset(self, published: str) -> str:
        """The id that is run for a dataset of the paper."""
        shift = self.shift or (SHIFT if self.is_stand_in else "")
        return (STAND_IN if self.is_stand_in else published) + (f"@{shift}" if shift else "")


@dataclass(frozen=True)
class Item:
    """A published number and the runs of ours that stand beside it, one per seed."""

    row: PublishedRow
    dataset: str
    """The paper's dataset, or that the number is a mean of several."""
    paper: float | None
    specs: tuple[RunSpec, ...] = ()
    missing: str = ""
    """Why nothing is run."""


@dataclass(frozen=True)
class Line:
    """The printed number, ours, and what keeps them from being the same experiment."""

    item: Item
    records: tuple[Record, ...]
    ours: float | None
    sd: float | None
    gain: float | None
    """Of ours over the reference row."""
    paper_gain: float | None
    reasons: tuple[str, ...]
    """Why the two cannot be compared; empty if they can, or if there is nothing of ours."""
    paper_side: Side
    our_side: Side | None
    note: str

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, in points; says little where there are ``reasons``."""
        if self.ours is None or self.item.paper is None:
            return None
        return self.ours - self.item.paper


def grid_file(name: str) -> Path:
    """A grid that comes with the package."""
    return Path(str(files("cliquetta.evaluation").joinpath(f"data/grids/{name}.json")))


def absent(datasets: Iterable[str], root: Path | None) -> dict[str, str]:
    """The datasets that are not under ``root``, each with the reason."""
    reasons = {}
    for dataset in datasets:
        try:
            get_dataset(dataset, root)
        except (ValueError, OSError) as error:
            reasons[dataset] = str(error)
    return reasons


def plan(table: PublishedTable, setting: Setting, only: Sequence[str] = ()) -> list[Item]:
    """What to run for a table; ``only`` names the methods wanted, all if empty.

    On the stand-in every row is run once, with the method's defaults and what the row itself says
    (a component, a combination); beside the data of the paper with the protocol of the row.
    """
    methods = [row.method for row in table.rows]
    for name in only:
        if name not in methods:
            raise UnknownNameError(f"method of table {table.name}", name, methods)
    rows = [row for row in table.rows if not only or row.method in only]
    if setting.is_stand_in:
        return _plan_stand_in(table, setting, rows)
    missing = absent(table.datasets, setting.root)
    return [
        _item(row, dataset, row.values[dataset], setting, missing.get(dataset, ""))
        for dataset in table.datasets
        for row in rows
        if dataset in row.values
    ]


def _plan_stand_in(
    table: PublishedTable, setting: Setting, rows: Sequence[PublishedRow]
) -> list[Item]:
    several = len(table.datasets) > 1
    shown = f"mean of {len(table.datasets)} sets" if several else table.datasets[0]
    chosen: dict[tuple[str, str], PublishedRow] = {}
    for row in rows:  # rows that differ in their protocol only would be the same run
        key = (row.method, repr(sorted(row.options.items())))
        if key not in chosen or (row.source == "P" != chosen[key].source):
            chosen[key] = row
    return [_item(row, shown, row.mean(table.datasets), setting, "") for row in chosen.values()]


def _item(
    row: PublishedRow, dataset: str, paper: float | None, setting: Setting, missing: str
) -> Item:
    method = get_method(row.method)
    fitted = setting.fitted.get(row.method)
    if method.fit is not None and fitted is None:
        missing = missing or "learns from labelled images first: `cliquetta fit`, then --fitted"
    if missing:
        return Item(row, dataset, paper, missing=missing)
    options = dict(row.options)
    preset, texts = None, setting.base.templates
    if not setting.is_stand_in:
        preset = (row.preset or "").replace("{dataset}", dataset)
        preset = preset if preset in method.presets else None
        options = {**row.options_by_dataset.get(dataset, {}), **options}
        texts = texts or row.protocol.texts(dataset)
    spec = replace(
        setting.base,
        dataset=setting.dataset(dataset),
        method=row.method,
        preset=None if fitted else preset,
        options=() if fitted else tuple(sorted(options.items())),
        templates=texts,
        fitted=fitted,
    )
    return Item(row, dataset, paper, tuple(replace(spec, seed=seed) for seed in setting.seeds))


def baselines(items: Sequence[Item]) -> list[RunSpec]:
    """Zero-shot runs under the conditions of all items: what `cliquetta compare` starts from."""
    specs = (spec for item in items for spec in item.specs)
    return list(dict.fromkeys(zero_shot(spec) for spec in specs))


def figures(
    table: PublishedTable, base: RunSpec, seeds: Sequence[int]
) -> dict[tuple[str, str], Ablation]:
    """The runs of a table's curves by field and modality; of the batch size, if it has none.

    The paper draws the batch size with either prompts alone, too.
    """
    found = {}
    for name in table.curves or (BATCH_SIZE,):
        for modality in ("both", "image", "text") if name == BATCH_SIZE else ("both",):
            alone = {} if modality == "both" else {"modalities": modality}
            spec = replace(base, options=tuple(sorted({**dict(base.options), **alone}.items())))
            found[name, modality] = ablation(spec, name, VALUES[name], seeds)
    return found


def lines(table: PublishedTable, items: Sequence[Item], results: Sequence[RunResult]) -> list[Line]:
    """Every item with what its runs gave."""
    found = {result.spec: result for result in results}
    made = [_line(item, [found[spec] for spec in item.specs if spec in found]) for item in items]
    label = table.reference or table.rows[0].label
    references = {line.item.dataset: line for line in made if line.item.row.label == label}
    return [_with_gain(line, references.get(line.item.dataset)) for line in made]


def _with_gain(line: Line, reference: Line | None) -> Line:
    if reference is None or reference is line:
        return line
    paper, ours = reference.item.paper, reference.ours
    return replace(
        line,
        gain=None if line.ours is None or ours is None else line.ours - ours,
        paper_gain=None if line.item.paper is None or paper is None else line.item.paper - paper,
    )


def _line(item: Item, results: Sequence[RunResult]) -> Line:
    records = tuple(result.record for result in results if result.record is not None)
    values = [record.metrics["top1"] for record in records if "top1" in record.metrics]
    errors = dict.fromkeys(result.error for result in results if result.error)
    return Line(
        item,
        records,
        statistics.mean(values) if values else None,
        statistics.stdev(values) if len(values) > 1 else None,
        None,
        None,
        reasons(item.row, item.dataset, records[0]) if records else (),
        published_side(item.row),
        our_side(records[0]) if records else None,
        "; ".join(filter(None, [item.missing, *errors, item.row.note])),
    )


def plain(line: Line) -> dict[str, Any]:
    """A line as JSON types."""
    row = line.item.row
    return {
        "label": row.label,
        "method": row.method,
        "dataset": line.item.dataset,
        "paper": line.item.paper,
        "source": row.source,
        "tuned_on_test": row.tuned_on_test,
        "paper_protocol": vars(line.paper_side),
        "ours": line.ours,
        "sd": line.sd,
        "our_protocol": None if line.our_side is None else vars(line.our_side),
        "difference": line.difference,
        "comparable": line.ours is not None and not line.reasons,
        "reasons": list(line.reasons),
        "paper_gain": line.paper_gain,
        "gain": line.gain,
        "nll": [record.metrics.get("nll") for record in line.records],
        "records": [record.id for record in line.records],
        "note": line.note,
    }
