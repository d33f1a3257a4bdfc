"""Runs to report on: made by hand, and evaluated with evidence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.evaluation.evidence_log import BatchEvidence, Evidence
from cliquetta.evaluation.grid import RunSpec, with_method
from cliquetta.evaluation.sweep import RunContext
from cliquetta.report.page import build_page
from cliquetta.report.runs import load_runs
from tests._helpers.made_runs import LABELS, NAMES, make_run
from tests._helpers.running import run as run


@pytest.fixture
def ablation(tmp_path: Path) -> Any:
    """One-at-a-time runs around threshold 0.8, lambda 1, batch size 4; two seeds at the centre."""
    base = {
        "threshold": 0.8,
        "concentration": 1.0,
        "modalities": "both",
        "retention": True,
    }
    right = [
        LABELS[:keep] + [(label + 1) % 4 for label in LABELS[keep:]]
        for keep in range(9)
    ]
    make_run(tmp_path, "zero_shot", LABELS, right[3])
    make_run(tmp_path, "scap", LABELS, right[4], config=base, seed=1)
    make_run(tmp_path, "scap", LABELS, right[7], config=base, batch_size=8)
    for count, changes in (
        (6, {}),
        (2, {"threshold": 0.6}),
        (5, {"threshold": 0.9}),
        (1, {"modalities": "text"}),
        (2, {"retention": False}),
        (
            8,
            {"threshold": 0.7, "concentration": 3.0},
        ),  # in two fields: it belongs on no curve
    ):
        make_run(tmp_path, "scap", LABELS, right[count], config=base | changes)
    return load_runs([tmp_path])[0]


@pytest.fixture(scope="session")
def evaluated(tiny_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Zero-shot and SCAP with evidence on 40 bundled images, by the tiny model."""
    folder = tmp_path_factory.mktemp("evaluated")
    context = RunContext(folder, device="cpu", evidence=True)
    plain = RunSpec(
        "bundled@fog:3", "zero_shot", str(tiny_file), limit=40, batch_size=20
    )
    context.run(plain)
    context.run(with_method(plain, "scap/lr=0.3/threshold=0.6"))
    return folder


@pytest.fixture(scope="session")
def page(evaluated: Any) -> Any:
    return build_page(*load_runs([evaluated]))


@pytest.fixture
def evidence() -> Evidence:
    """Six images and four cliques of one batch."""
    cliques = [
        {"id": 0, "class": 1, "members": [0, 1, 2], "size": 3, "set": 0},
        {"id": 1, "class": 2, "members": [0, 1, 2], "size": 3, "set": 0},
        {"id": 2, "class": 1, "members": [3, 4], "size": 2, "set": 1},
        {"id": 3, "class": 3, "members": [4, 5], "size": 2, "set": 2},
    ]
    cliques = [clique | {"before": {"total": 1.5}, "after": None} for clique in cliques]
    features = np.eye(6, dtype=np.float32)
    features[1] = features[2] = [0.6, 0.8, 0, 0, 0, 0]
    batch = BatchEvidence(
        number=2,
        keys=tuple("abcdef"),
        labels=(0, 0, 1, 1, 2, -1),
        before=(1, 0, 1, 1, 2, 3),
        after=(0, 0, 0, 1, 3, 2),
        description={"cliques": cliques},
        features=features,
        prompted=None,
        pictures=np.zeros((6, 8, 8, 3), np.uint8),
        maps=(),
    )
    return Evidence(NAMES, (), (batch,))
