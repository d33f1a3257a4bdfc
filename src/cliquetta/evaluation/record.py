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
from cliquetta.methods.base import Adapter
from cliquetta.methods.state import fitted_fingerprint, plain_config
from cliquetta.version import installed_version

try:
    import resource
except (
    ImportError
):  # Windows has no such module; the record then leaves the host's peak out
    resource = None  # type: ignore[assignment]

RECORD = "record.json"
STATE = "state.safetensors"

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
    """The record of a run before it runs: its id and all that its predictions depend on."""
    model, prompts, preprocess = adapter.model, adapter.prompts, stream.preprocess
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
    """A name that equal settings share: dataset, method, seed, hash."""
    dataset = re.sub(r"[^A-Za-z0-9.@+_>-]+", "-", str(settings["dataset"])).strip("-")
    dataset = re.sub(r"[@>+]", "_", dataset)[-60:].strip("-_.")
    return (
        f"{dataset}--{settings['method']}--{settings['seed']}--{digest(settings)[:10]}"
    )


def digest(value: Any) -> str:
    """Hash of JSON content."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def environment(device: torch.device) -> dict[str, Any]:
    """Describe versions, platform and device of this process."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor()
    )
    return {
        "versions": {
            "python": platform.python_version(),
            **{p: installed_version(p) for p in _PACKAGES},
        },
        "platform": platform.platform(),
        "device": str(device),
        "device_name": name or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def peak_memory(device: torch.device) -> dict[str, int]:
    """Highest use so far in bytes: of the process, and of tensors on a CUDA device."""
    peak = {}
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak["host"] = used if sys.platform == "darwin" else used * 1024
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_allocated(device)
    return peak


def load_record(folder: Path | str) -> Record:
    """The record in a run's folder."""
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
    """All records under a folder of runs, by id."""
    return [load_record(path.parent) for path in sorted(Path(root).glob(f"*/{RECORD}"))]


def verify_predictions(record: Record, folder: Path) -> None:
    """Refuse predictions that were cut, changed or deleted after the run had finished."""
    if not record.predictions:  # read from a packed file
        return
    try:
        damage = (
            ""
            if fingerprint_predictions(folder) == record.predictions
            else "was changed"
        )
    except FileNotFoundError:
        damage = "is gone"
    if damage:
        raise DamagedRunError(
            f"the run {record.id} is damaged: {folder / PREDICTIONS} {damage} after it had "
            "finished; `cliquetta evaluate` with the same options runs it again, or delete the "
            "folder"
        )


PACKED = "cliquetta-records-1"
_SHARED = "$shared"


def pack_records(records: Iterable[Record]) -> str:
    """Records as one small JSON document; without accuracies per class and skipped names."""
    shared: dict[str, Any] = {}

    def share(value: Any) -> Any:
        if not isinstance(value, (Mapping, list)) or len(json.dumps(value)) < 40:
            return value
        shared[digest(value)] = value
        return {_SHARED: digest(value)}

    lines = []
    for record in records:
        plain = dataclasses.asdict(record)
        plain["metrics"] = {
            k: v for k, v in plain["metrics"].items() if k != "per_class"
        }
        plain["skipped"] = [{"key": "", "reason": ""} for _ in plain["skipped"]]
        del plain["predictions"]
        plain["environment"] = share(plain["environment"])
        stream = plain["settings"]["stream"]
        stream["datasets"] = share(stream["datasets"])
        plain["settings"] = {
            name: share(value) for name, value in plain["settings"].items()
        }
        lines.append(json.dumps(plain, ensure_ascii=False))
    known = json.dumps(shared, ensure_ascii=False)
    body = ",\n".join(lines)
    return f'{{"format": "{PACKED}",\n"shared": {known},\n"records": [\n{body}\n]}}\n'


def unpack_records(path: Path | str) -> list[Record]:
    """The records in a file of :func:`pack_records`."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["format"] != PACKED:
            raise UserError(f"{path} has format {document['format']!r}, not {PACKED}")

        def restore(value: Any) -> Any:
            if isinstance(value, dict) and _SHARED in value:
                value = document["shared"][value[_SHARED]]
            return (
                {k: restore(v) for k, v in value.items()}
                if isinstance(value, dict)
                else value
            )

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
    def name(self) -> str:
        """Method and preset."""
        preset = self.record.preset
        return self.record.method + (f":{preset}" if preset else "")

    @property
    def order(self) -> str:
        """The order of the stream."""
        return str(self.record.settings["stream"]["order"])

    @property
    def own_order(self) -> dict[str, Any]:
        """Settings that only some orders have."""
        stream = self.record.settings["stream"]
        reads = SAMPLERS[self.order].reads if self.order in SAMPLERS else ()
        return {name: stream[name] for name in reads if name in stream}

    @property
    def protocol(self) -> dict[str, str]:
        """Properties that are equal within a column; the order counts where it chose the images."""
        settings, own_order = self.record.settings, self.own_order
        prompts, stream = settings["prompts"], settings["stream"]
        templates, limit = prompts["templates"], stream["limit"]
        shown = (
            repr(templates[0]) if len(templates) == 1 else f"{len(templates)} templates"
        )
        order = {"order": self.order, "dirichlet": stream["dirichlet"], **own_order}
        chosen = [limit, *order.values()] if limit or own_order else []
        unknown = [stream["unknown"]] if "unknown" in stream else []
        files = [[domain["files"] for domain in stream["datasets"]], chosen, *unknown]
        total = sum(domain["images"] for domain in stream["datasets"])
        return {
            "preprocessing": settings["preprocessing"]["fingerprint"],
            "class names": f"{prompts['classes']} names {prompts['names']}",
            "templates": f"{shown} {prompts['fingerprint']}",
            "images": f"{f'{limit} of ' if limit else ''}{total} {digest(files)}",
        }

    @property
    def conditions(self) -> dict[str, Any]:
        """Conditions of a row beside the method's config; shown where rows differ in them."""
        model, stream = self.record.settings["model"], self.record.settings["stream"]
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
    """The finished and the unfinished runs in folders of runs, folders of one, or files.

    They keep the order of ``paths``; those of one folder come in the order of their
    start.
    """
    by_id: dict[str, Run] = {}
    for path in map(Path, paths):
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
        for run in runs:
            if run.folder is not None and run.record.status == "finished":
                verify_predictions(run.record, run.folder)
            if by_id.setdefault(run.record.id, run).record.status != "finished":
                by_id[run.record.id] = run
    finished = [run for run in by_id.values() if run.record.status == "finished"]
    return finished, [run for run in by_id.values() if run.record.status != "finished"]
