"""The protocol behind a number, of both sides, and what keeps two numbers from being compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cliquetta.data.catalogue import list_datasets
from cliquetta.evaluation.published import PublishedRow, published_model
from cliquetta.evaluation.record import Record
from cliquetta.methods.base import BatchDependence
from cliquetta.methods.registry import get_method
from cliquetta.prompts.catalogue import list_templates, templates


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


def _image_reasons(record: Record) -> list[str]:
    """Whether fewer images were scored than a complete copy of the data set holds."""
    id = record.dataset.partition("@")[0]
    expected = {entry.id: entry.expected.get("images") for entry in list_datasets()}.get(id)
    total = expected or sum(d["images"] for d in record.settings["stream"]["datasets"])
    return [f"{record.images:,} of {total:,} images of {id}"] if record.images != total else []
