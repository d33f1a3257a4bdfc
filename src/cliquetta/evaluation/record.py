"""The record of a run: what was done, with what, and what came out; one folder per run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from cliquetta.atomic import write_atomically
from cliquetta.data.prepared import FeatureStream
from cliquetta.data.stream import Stream
from cliquetta.errors import UserError
from cliquetta.evaluation.predictions import Predictions, read_predictions
from cliquetta.methods._shared.state import plain_config
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts

try:
    import resource
except ImportError:  # Windows has no such module; the record then leaves the host's peak out
    resource = None  # type: ignore[assignment]

RECORD = "record.json"
PREDICTIONS = "predictions.jsonl"
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
    """Images predicted."""
    skipped: tuple[Mapping[str, str], ...] = ()
    """Files that could not be read: ``key`` and ``reason``."""
    throughput: Mapping[str, float] = field(default_factory=dict)
    peak_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes on the host and on the device."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Plain values of the last prediction's evidence, such as which path the engine took."""
    started: str = ""
    finished: str = ""
    resumed: int = 0
    """How many times the run was taken up again."""
    error: str = ""

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.settings["method"])

    @property
    def dataset(self) -> str:
        """Ids of the data sets, as in :attr:`Stream.id`."""
        return str(self.settings["dataset"])

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.settings["seed"])

    def save(self, folder: Path) -> None:
        """Write ``record.json``, whole or not at all."""
        text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)
        write_atomically(folder / RECORD, text.encode())


def describe_run(
    *,
    method: str,
    config: Any,
    seed: int,
    model: CLIP,
    prompts: ClassPrompts,
    stream: Stream | FeatureStream,
    fitted: str | None = None,
) -> dict[str, Any]:
    """All settings on which the predictions of a run depend, as JSON types.

    ``fitted`` is the hash of what a few-shot method was built from.
    """
    preprocess = stream.preprocess
    return {
        "dataset": stream.id,
        "method": method,
        "config": plain_config(config),
        "fitted": fitted,
        "seed": seed,
        "model": {
            "id": model.id,
            "fingerprint": model.fingerprint,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "preprocessing": {**preprocess.to_dict(), "fingerprint": preprocess.fingerprint},
        "prompts": {
            "classes": len(prompts),
            "names": digest(list(prompts.names)),
            "templates": list(prompts.templates),
            "fingerprint": prompts.fingerprint,
        },
        "stream": stream.settings(),
    }


def run_id(settings: Mapping[str, Any]) -> str:
    """A name that equal settings share: data set, method, seed, hash."""
    dataset = re.sub(r"[^A-Za-z0-9.@+_>-]+", "-", str(settings["dataset"])).strip("-")
    dataset = re.sub(r"[@>+]", "_", dataset)[-60:].strip("-_.")
    return f"{dataset}--{settings['method']}--{settings['seed']}--{digest(settings)[:10]}"


def digest(value: Any) -> str:
    """Hash of JSON content."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def environment(device: torch.device) -> dict[str, Any]:
    """What the run ran on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def load_record(folder: Path | str) -> Record:
    """The record in a run's folder."""
    path = Path(folder) / RECORD
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        values["skipped"] = tuple(values["skipped"])
        return Record(**values)
    except FileNotFoundError:
        raise UserError(f"{folder} is not the folder of a run: it has no {RECORD}") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a record that this version can read ({error})") from error


def list_records(root: Path | str) -> list[Record]:
    """All records under a folder of runs, by id."""
    return [load_record(path.parent) for path in sorted(Path(root).glob(f"*/{RECORD}"))]


def load_predictions(folder: Path | str) -> Predictions:
    """The per-sample predictions in a run's folder, complete or so far."""
    return read_predictions(Path(folder) / PREDICTIONS)
