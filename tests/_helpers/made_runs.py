"""Folders of runs made by hand, so that every number on a report is known beforehand."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.metrics import Metrics
from cliquetta.evaluation.predictions import PREDICTIONS, PredictionLog, Predictions
from cliquetta.evaluation.record import Record, digest, load_record, run_id

BASE = RunSpec("bundled", "zero_shot", model="tiny", limit=30, batch_size=10)
"""A small run; the fixtures that load its model are where it is used."""
LABELS = [0, 0, 1, 1, 2, 2, 3, 3]
PLAIN = [0, 1, 1, 0, 2, 3, 3, 3]
ADAPTED = [0, 0, 1, 2, 3, 3, 3, 2]
"""Against plain: image 1 is repaired, 4 and 7 are broken, 3 moves sideways."""
STREAM = 4 * LABELS, 4 * PLAIN, 4 * ADAPTED
NAMES = ("cat", "dog", "<b>frog</b> & co", "ship")


def logits_of(predicted: Sequence[int], confidence: float = 0.8) -> torch.Tensor:
    """Logits whose best class is the predicted one, with this probability."""
    rest = (1 - confidence) / (len(NAMES) - 1)
    probabilities = torch.full((len(predicted), len(NAMES)), rest)
    probabilities[torch.arange(len(predicted)), torch.tensor(predicted)] = confidence
    return probabilities.log()


def predictions(
    labels: Sequence[int], predicted: Sequence[int], confidence: float = 0.8
) -> Predictions:
    """Predictions in memory; images are named by their index."""
    best = logits_of(predicted, confidence).softmax(dim=-1).topk(4, dim=-1)
    return Predictions(
        tuple(f"image-{index}" for index in range(len(labels))),
        np.array(labels, np.int64),
        best.indices.numpy(),
        best.values.numpy(),
    )


def make_run(
    root: Path,
    method: str,
    labels: Sequence[int],
    predicted: Sequence[int],
    *,
    config: dict[str, Any] | None = None,
    dataset: str = "toy@fog:3",
    batch_size: int = 4,
    seed: int = 0,
    status: Any = "finished",
    names: Sequence[str] = NAMES,
    evidence: bool = False,
) -> Path:
    """A run's folder as the runner leaves it; ``evidence`` of no batch, with the class names."""
    settings = {
        "dataset": dataset,
        "method": method,
        "config": config or {},
        "fitted": None,
        "seed": seed,
        "model": {"id": "micro", "fingerprint": "0123", "dtype": "float32"},
        "preprocessing": {"size": 32, "fingerprint": "4567"},
        "prompts": {
            "classes": len(names),
            "names": digest(list(names)),
            "templates": ["a photo of a {}."],
            "fingerprint": "89ab",
        },
        "stream": {
            "datasets": [{"id": dataset, "images": len(labels), "files": "cdef"}],
            "batch_size": batch_size,
            "order": "shuffled",
            "seed": seed,
            **dict.fromkeys(("views", "view_seed", "dirichlet", "limit")),
        },
    }
    folder = root / run_id(settings)
    folder.mkdir(parents=True)
    logits = logits_of(predicted)
    known = torch.tensor(labels)
    metrics = Metrics(len(names))
    metrics.update(logits, known)
    with closing(PredictionLog(folder / PREDICTIONS)) as log:
        log.append([f"image-{index}" for index in range(len(labels))], known, logits)
    Record(
        folder.name,
        settings,
        status=status,
        environment={"device": "cpu", "versions": {"cliquetta": "0.1.0"}},
        metrics=metrics.compute(),
        images=len(labels),
        throughput={"images_per_second": 12.5, "seconds": 1.0},
        peak_memory={"host": 2**30},
        started="2025-01-01T10:00:00+00:00",
        finished="2025-01-01T10:00:01+00:00",
    ).save(folder)
    if evidence:
        about = {"format": "cliquetta-evidence-2", "names": list(names)}
        (folder / "evidence").mkdir()
        (folder / "evidence" / "about.json").write_text(json.dumps(about))
    return folder


def make_records(root: Path) -> list[Record]:
    """Zero-shot and two methods on three datasets with two seeds; TDA takes twice the time."""
    datasets = ("toy@fog:3", "toy@contrast:3", "toy")
    right = {  # images by method, on the three datasets with either seed
        "zero_shot": ((10, 10), (12, 12), (18, 18)),
        "tda": ((12, 14), (11, 11), (18, 18)),
        "tent": ((9, 9), (8, 8), (16, 18)),
    }
    labels = (0, 1, 2, 3) * 5
    records = []
    for method, by_dataset in right.items():
        for dataset, by_seed in zip(datasets, by_dataset, strict=True):
            for seed, count in enumerate(by_seed):
                classes = [
                    (label + (index >= count)) % 4 for index, label in enumerate(labels)
                ]
                folder = make_run(
                    root, method, labels, classes, dataset=dataset, seed=seed
                )
                record = replace(
                    load_record(folder),
                    throughput={
                        "images_per_second": 50.0 if method == "tda" else 100.0,
                        "seconds": 1.0,
                    },
                    environment={
                        "device_name": "toaster",
                        "versions": {"torch": "9.9"},
                    },
                )
                record.save(folder)
                records.append(record)
    return records


def table_cells(table: str, method: str) -> Sequence[str]:
    """The cells of a method's row in a table of Markdown."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| `{method}`")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]
