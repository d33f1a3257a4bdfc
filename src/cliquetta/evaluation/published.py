"""Published numbers, from ``data/published.json``, and what keeps ours from being compared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

from cliquetta.data.catalogue import list_datasets
from cliquetta.errors import UnknownNameError
from cliquetta.evaluation.record import Record
from cliquetta.methods.base import BatchDependence
from cliquetta.methods.registry import get_method, method_config
from cliquetta.methods.state import plain_config
from cliquetta.prompts.catalogue import list_templates, template_choice, templates


@dataclass(frozen=True)
class Protocol:
    """How a published number was made, as far as it is known (``None``: it is not)."""

    views: int | None
    templates: str | None
    """A template set, or the method whose choice per dataset it is."""
    batch_size: int | None = None
    shots: int | None = None
    """Labelled images per class that the method was trained on."""

    def texts(self, dataset: str) -> tuple[str, ...] | None:
        """The templates on a dataset, if they are known."""
        if self.templates is None or self.templates in list_templates():
            return None if self.templates is None else templates(self.templates)
        try:
            return templates(template_choice(self.templates, dataset))
        except UnknownNameError:
            return None


@dataclass(frozen=True)
class PublishedRow:
    """One row of a table, and the settings with which ours comes nearest to it."""

    label: str
    method: str
    source: str
    """Key of :func:`sources`."""
    values: Mapping[str, float]
    """Top-1 in percent by dataset."""
    protocol: Protocol
    preset: str | None = None
    """``{dataset}`` stands for the preset that is named after the dataset."""
    options: Mapping[str, Any] = field(default_factory=dict)
    options_by_dataset: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Constants that the authors' scripts set per dataset."""
    tuned_on_test: bool = False
    note: str = ""

    def config(self, dataset: str) -> Any:
        """The settings with which ours comes nearest to the row on a dataset."""
        preset = (self.preset or "").replace("{dataset}", dataset)
        known = preset if preset in get_method(self.method).presets else None
        options = {**self.options_by_dataset.get(dataset, {}), **self.options}
        return method_config(self.method, known, options)

    def mean(self, datasets: tuple[str, ...]) -> float | None:
        """Mean over datasets, if all of them are published."""
        known = [self.values[dataset] for dataset in datasets if dataset in self.values]
        return statistics.mean(known) if len(known) == len(datasets) else None


@dataclass(frozen=True)
class PublishedTable:
    """A table or figure of the paper."""

    name: str
    title: str
    where: str
    datasets: tuple[str, ...]
    rows: tuple[PublishedRow, ...]
    reference: str | None = None
    """Label of the row that gains count from; the first if none is named."""
    curves: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of a figure: by config field, its symbol and what the paper says about it."""
    statements: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    text = files("cliquetta.evaluation").joinpath("data/published.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def sources() -> dict[str, str]:
    """What the letters behind numbers mean."""
    return dict(_document()["sources"])


def published_model() -> tuple[str, frozenset[str]]:
    """Name of the model behind all numbers, and the ids under which it loads here."""
    model = _document()["model"]
    return str(model["name"]), frozenset(model["ids"])


def list_tables() -> list[str]:
    """Names of all tables."""
    return list(_document()["tables"])


def published_table(name: str) -> PublishedTable:
    """The table of a name."""
    tables = _document()["tables"]
    if name not in tables:
        raise UnknownNameError("table", name, tables)
    entry = tables[name]
    rows = tables[entry["rows_of"]]["rows"] if "rows_of" in entry else entry["rows"]
    return PublishedTable(
        name,
        entry["title"],
        entry["where"],
        tuple(entry["datasets"]),
        tuple(_row(row, entry["datasets"]) for row in rows),
        entry.get("reference"),
        entry.get("curves", {}),
        tuple(entry.get("statements", ())),
    )


def _row(row: Mapping[str, Any], datasets: list[str]) -> PublishedRow:
    run = row.get("run", {})
    return PublishedRow(
        row["label"],
        row["method"],
        row["source"],
        {dataset: row["values"][dataset] for dataset in datasets if dataset in row["values"]},
        Protocol(**row["protocol"]),
        run.get("preset"),
        run.get("options", {}),
        run.get("options_by_dataset", {}),
        row.get("tuned_on_test", False),
        row.get("note", ""),
    )


@dataclass(frozen=True)
class Side:
    """The protocol of one side, in words."""

    views: str
    templates: str
    batch_size: str


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def published_side(row: PublishedRow) -> Side:
    """The protocol behind a published row."""
    known = row.protocol
    shots = f" {known.shots} shots" if known.shots else ""
    return Side(_or_dash(known.views), f"{known.templates or '–'}{shots}", _batch(row))


def _batch(row: PublishedRow) -> str:
    if get_method(row.method).adapter.batch_dependence is not BatchDependence.JOINT:
        return "any"
    return _or_dash(row.protocol.batch_size)


def our_side(record: Record) -> Side:
    """The protocol of a run."""
    joint = get_method(record.method).adapter.batch_dependence is BatchDependence.JOINT
    return Side(
        str(_views(record)),
        template_name(record.settings["prompts"]["templates"]),
        str(record.settings["stream"]["batch_size"]) if joint else "any",
    )


def _views(record: Record) -> int:
    views = record.settings["stream"]["views"]
    return 1 if views is None else int(views["count"])


def template_name(texts: Sequence[str]) -> str:
    """The set that templates are, or the only one itself, or their number."""
    known = [name for name in ("single", *list_templates()) if templates(name) == tuple(texts)]
    if known:
        return known[0]
    return repr(texts[0]) if len(texts) == 1 else f"{len(texts)} templates"


def reasons(row: PublishedRow, dataset: str, record: Record) -> tuple[str, ...]:
    """What keeps a record from being the published experiment, from what the record says."""
    name, ids = published_model()
    settings, protocol = record.settings, row.protocol
    stream, model = settings["stream"], settings["model"]["id"]
    found = []
    if model not in ids:
        found.append(f"model {model} instead of {name}")
    if record.dataset != dataset:
        found.append(f"data {record.dataset} instead of {dataset}")
    found += _image_reasons(record)
    if protocol.views not in (None, _views(record)):
        found.append(f"views: {_views(record)} instead of {protocol.views}")
    else:
        found += _setting_reasons(row, dataset, record)
    texts = protocol.texts(dataset)
    if texts is not None and tuple(settings["prompts"]["templates"]) != texts:
        ours = template_name(settings["prompts"]["templates"])
        found.append(f"templates: {ours} instead of {template_name(texts)}")
    if protocol.templates is None and protocol.shots is None:
        found.append("the published templates are not known")
    joint = get_method(record.method).adapter.batch_dependence is BatchDependence.JOINT
    if joint and protocol.batch_size not in (None, stream["batch_size"]):
        found.append(f"batch size {stream['batch_size']} instead of {protocol.batch_size}")
    return tuple(found)


def _setting_reasons(row: PublishedRow, dataset: str, record: Record) -> list[str]:
    """Differences from the authors' own constants: how views are made, how templates are mixed."""
    wanted = plain_config(row.config(dataset))
    ours = record.settings["config"]
    relevant = []
    if _views(record) > 1:
        relevant.append("view_kind")
        relevant.append("view_zoom" if wanted.get("view_kind") == "zoom-crop" else "view_min_area")
    if len(record.settings["prompts"]["templates"]) > 1:
        relevant.append("text_mix")
    return [
        f"{name}: {ours[name]} instead of {wanted[name]}"
        for name in relevant
        if name in wanted and name in ours and ours[name] != wanted[name]
    ]


def _image_reasons(record: Record) -> list[str]:
    """Whether fewer images were scored than a complete copy of the dataset holds."""
    id = record.dataset.partition("@")[0]
    expected = {entry.id: entry.expected.get("images") for entry in list_datasets()}.get(id)
    total = expected or sum(d["images"] for d in record.settings["stream"]["datasets"])
    return [f"{record.images:,} of {total:,} images of {id}"] if record.images != total else []
