"""Runs on disk, one folder each: the record, the prediction for every image, what is alike."""

import dataclasses
import hashlib
import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from cliquetta.atomic import write_atomically
from cliquetta.data.prepared import AnyStream
from cliquetta.data.samplers import SAMPLERS
from cliquetta.errors import UserError
from cliquetta.evaluation.predictions import (
    PREDICTIONS,
    DamagedRunError,
    Predictions,
    fingerprint_predictions,
    load_predictions,
)
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.state import fitted_fingerprint, plain_config
from cliquetta.version import installed_version

try:
    import resource
except ImportError:
    # Windows has no such module; the record then leaves the host's peak out.
    resource = None  # type: ignore[assignment]

RECORD = "record.json"
STATE = "state.safetensors"

_DATASET_LENGTH = 60  # characters of a dataset in the name of a run
_PACKAGES = ("cliquetta", "torch", "numpy", "pillow", "safetensors", "torchmetrics")


@dataclass(frozen=True)
class Record:
    """One run. ``settings`` decide the numbers; the rest says what came out, and on what."""

    id: str
    settings: Mapping[str, Any]
    status: Literal["running", "finished", "failed"] = "running"
    preset: str | None = None
    """The named settings that ``settings["config"]`` was made from."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    images: int = 0
    skipped: tuple[Mapping[str, str], ...] = ()
    """Files that could not be read: ``key`` and ``reason``."""
    throughput: Mapping[str, float] = field(default_factory=dict)
    peak_memory: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Plain values of the last prediction's evidence, such as which path the engine took."""
    started: str = ""
    finished: str = ""
    resumed: int = 0
    error: str = ""
    predictions: Mapping[str, Any] = field(default_factory=dict)
    """Length (``bytes``) and ``sha256`` of the finished file of predictions."""

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.settings["method"])

    @property
    def dataset(self) -> str:
        """Ids of the datasets, as in :attr:`Stream.id`."""
        return str(self.settings["dataset"])

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.settings["seed"])

    def save(self, folder: Path) -> None:
        """Write ``record.json``, completely or not at all."""
        text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)
        write_atomically(folder / RECORD, text.encode())


def plan(adapter: Adapter, stream: AnyStream, preset: str | None = None) -> Record:
    """Describe a run before it runs: its id and all that its predictions depend on."""
    model = adapter.model
    prompts = adapter.prompts
    preprocess = stream.preprocess
    settings = {
        "dataset": stream.id,
        "method": adapter.name,
        "config": plain_config(adapter.config),
        "fitted": fitted_fingerprint(adapter),
        "seed": adapter.seed,
        "model": {
            "id": model.id,
            "fingerprint": model.fingerprint,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "preprocessing": {
            **preprocess.to_dict(),
            "fingerprint": preprocess.fingerprint,
        },
        "prompts": {
            "classes": len(prompts),
            "names": digest(list(prompts.names)),
            "templates": list(prompts.templates),
            "fingerprint": prompts.fingerprint,
        },
        "stream": stream.settings(),
    }
    return Record(run_id(settings), settings, preset=preset)


def run_id(settings: Mapping[str, Any]) -> str:
    """Make a name that equal settings share: dataset, method, seed, hash."""
    # Signs that a folder's name may not have become dashes, those of ids underscores.
    dataset = str(settings["dataset"])
    dataset = re.sub(r"[^A-Za-z0-9.@+_>-]+", "-", dataset).strip("-")
    dataset = re.sub(r"[@>+]", "_", dataset)
    dataset = dataset[-_DATASET_LENGTH:].strip("-_.")
    run_hash = digest(settings)[:10]
    return f"{dataset}--{settings['method']}--{settings['seed']}--{run_hash}"


def digest(value: Any) -> str:
    """Hash JSON content."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def environment(device: torch.device) -> dict[str, Any]:
    """Describe versions, platform and device of this process."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = platform.processor()
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        versions[package] = installed_version(package)
    return {
        "versions": versions,
        "platform": platform.platform(),
        "device": str(device),
        "device_name": name or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def peak_memory(device: torch.device) -> dict[str, int]:
    """Measure the highest use so far in bytes: of the process, of tensors on a CUDA device."""
    peak = {}
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak["host"] = used if sys.platform == "darwin" else used * 1024
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_allocated(device)
    return peak


def load_record(folder: Path | str) -> Record:
    """Load the record in a run's folder."""
    path = Path(folder) / RECORD
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not the folder of a run: it has no {RECORD}"
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a record that this version can read ({error})"
        ) from error


def _parse(values: Mapping[str, Any]) -> Record:
    return Record(**{**values, "skipped": tuple(values["skipped"])})


def list_records(root: Path | str) -> list[Record]:
    """Load all records under a folder of runs, by id."""
    return [load_record(path.parent) for path in sorted(Path(root).glob(f"*/{RECORD}"))]


def verify_predictions(record: Record, folder: Path) -> None:
    """Refuse predictions that were cut, changed or deleted after the run had finished."""
    if not record.predictions:  # read from a packed file
        return
    try:
        if fingerprint_predictions(folder) == record.predictions:
            return
        damage = "was changed"
    except FileNotFoundError:
        damage = "is gone"
    raise DamagedRunError(
        f"the run {record.id} is damaged: {folder / PREDICTIONS} {damage} after it had "
        "finished; `cliquetta evaluate` with the same options runs it again, or delete the "
        "folder"
    )


PACKED = "cliquetta-records-1"
_SHARED = "$shared"
_SHARED_LENGTH = 40  # characters of JSON from which on a value is kept once for all


def pack_records(records: Iterable[Record]) -> str:
    """Write records as one small JSON document, without accuracies per class or skipped names."""
    shared: dict[str, Any] = {}

    def share(value: Any) -> Any:
        """Keep a value once for all records, and leave its hash in its place."""
        nested = isinstance(value, Mapping | list)
        if not nested or len(json.dumps(value)) < _SHARED_LENGTH:
            return value
        name = digest(value)
        shared[name] = value
        return {_SHARED: name}

    lines = []
    for record in records:
        plain = dataclasses.asdict(record)
        plain["metrics"].pop("per_class", None)
        # Names and reasons of unreadable files are of no use elsewhere, their number
        # is.
        plain["skipped"] = [{"key": "", "reason": ""} for _ in plain["skipped"]]
        del plain["predictions"]
        plain["environment"] = share(plain["environment"])

        settings = plain["settings"]
        stream = settings["stream"]
        # Streams of other orders and seeds have the same datasets.
        stream["datasets"] = share(stream["datasets"])
        for name, value in settings.items():
            settings[name] = share(value)
        lines.append(json.dumps(plain, ensure_ascii=False))
    table = json.dumps(shared, ensure_ascii=False)
    body = ",\n".join(lines)
    return f'{{"format": "{PACKED}",\n"shared": {table},\n"records": [\n{body}\n]}}\n'


def unpack_records(path: Path | str) -> list[Record]:
    """Read the records in a file of :func:`pack_records`."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["format"] != PACKED:
            raise UserError(f"{path} has format {document['format']!r}, not {PACKED}")

        def restore(value: Any) -> Any:
            """Put shared values back, at any depth."""
            if not isinstance(value, dict):
                return value
            if _SHARED in value:
                value = document["shared"][value[_SHARED]]
                return restore(value)
            return {name: restore(entry) for name, entry in value.items()}

        return [_parse(restore(entry)) for entry in document["records"]]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} holds no records that this version can read ({error})"
        ) from error


@dataclass(frozen=True)
class Run:
    """A record and its folder; one of a packed file has none."""

    record: Record
    folder: Path | None

    @cached_property
    def predictions(self) -> Predictions:
        """The prediction for every image."""
        if self.folder is None:
            raise UserError(f"{self.record.id} comes from a file without predictions")
        verify_predictions(self.record, self.folder)
        return load_predictions(self.folder)

    @property
    def finished(self) -> bool:
        """Whether all images were predicted."""
        return self.record.status == "finished"

    @property
    def name(self) -> str:
        """Method and preset."""
        preset = self.record.preset
        return f"{self.record.method}:{preset}" if preset else self.record.method

    @property
    def order(self) -> str:
        """The order of the stream."""
        return str(self.record.settings["stream"]["order"])

    @property
    def own_order(self) -> dict[str, Any]:
        """Settings that only some orders have."""
        if self.order not in SAMPLERS:
            return {}
        stream = self.record.settings["stream"]
        names = SAMPLERS[self.order].reads
        return {name: stream[name] for name in names if name in stream}

    @property
    def protocol(self) -> dict[str, str]:
        """Properties that are equal within a column; the order counts where it chose the images."""
        settings = self.record.settings
        prompts = settings["prompts"]
        templates = prompts["templates"]
        if len(templates) == 1:
            template_text = repr(templates[0])
        else:
            template_text = f"{len(templates)} templates"
        return {
            "preprocessing": settings["preprocessing"]["fingerprint"],
            "class names": f"{prompts['classes']} names {prompts['names']}",
            "templates": f"{template_text} {prompts['fingerprint']}",
            "images": self._images_text(),
        }

    def _images_text(self) -> str:
        """Write the number of images, and a hash of which they are."""
        stream = self.record.settings["stream"]
        limit = stream["limit"]
        own_order = self.own_order
        files: list[Any] = [[domain["files"] for domain in stream["datasets"]]]
        if limit or own_order:
            order = (self.order, stream["dirichlet"], *own_order.values())
            files.append([limit, *order])
        else:
            files.append([])
        if "unknown" in stream:
            files.append(stream["unknown"])
        total = sum(domain["images"] for domain in stream["datasets"])
        some = f"{limit} of " if limit else ""
        return f"{some}{total} {digest(files)}"

    @property
    def conditions(self) -> dict[str, Any]:
        """Conditions of a row beside the method's config; shown where rows differ in them."""
        model = self.record.settings["model"]
        stream = self.record.settings["stream"]
        return {
            "model": model["id"],
            "weights": model["fingerprint"],
            "dtype": model["dtype"],
            "batch_size": stream["batch_size"],
            "order": self.order,
            "dirichlet": stream["dirichlet"],
            **self.own_order,
        }

    @property
    def setting(self) -> dict[str, Any]:
        """The method's config, and what it was fitted from."""
        return {
            **self.record.settings["config"],
            "fitted": self.record.settings["fitted"],
        }

    @cached_property
    def row(self) -> str:
        """Equal for runs that differ in dataset and seed only."""
        return json.dumps([self.name, self.setting, self.conditions], sort_keys=True)


def find_runs(paths: Iterable[Path | str]) -> tuple[list[Run], list[Run]]:
    """Find the finished and the unfinished runs in folders of runs, folders of one, or files.

    They keep the order of ``paths``; those of one folder come in the order of their
    start.
    """
    by_id: dict[str, Run] = {}
    for path in map(Path, paths):
        for run in _runs_at(path):
            if run.finished and run.folder is not None:
                verify_predictions(run.record, run.folder)
            # A run may be in several places: a finished one counts.
            before = by_id.setdefault(run.record.id, run)
            if not before.finished:
                by_id[run.record.id] = run
    finished = [run for run in by_id.values() if run.finished]
    unfinished = [run for run in by_id.values() if not run.finished]
    return finished, unfinished


def _runs_at(path: Path) -> list[Run]:
    """List the runs of a file of records, of a run's folder, or of a folder of runs."""
    folder = path.parent if path.name == RECORD else path
    if path.name != RECORD and path.is_file():
        runs = [Run(record, None) for record in unpack_records(path)]
    elif (folder / RECORD).exists():
        runs = [Run(load_record(folder), folder)]
    elif folder.is_dir():
        in_order = sorted(list_records(folder), key=lambda record: record.started)
        runs = [Run(record, folder / record.id) for record in in_order]
    else:
        raise UserError(f"no such folder: {path}")
    if not runs:
        raise UserError(
            f"no runs in {path}: `cliquetta evaluate --out {path}` makes some"
        )
    return runs
