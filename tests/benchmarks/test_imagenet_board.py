"""The program that runs ImageNet's grids: what it packs, and its order."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.imagenet_board import (
    Packer,
    Plan,
    read_streams,
    run,
)
from cliquetta.evaluation.record import unpack_records
from tests._helpers.made_runs import ADAPTED, LABELS, PLAIN, make_run


@pytest.fixture
def plan(tiny_file: Path, tmp_path: Path) -> Plan:
    """Three blocks over bundled images with a tiny model; the last has a stream again."""
    shared = {"model": str(tiny_file), "limit": 20, "batch_size": 10}
    blocks = [
        {**shared, "methods": ["tda"]},
        {"datasets": ["bundled", "bundled@fog:5"]},
        {"datasets": ["bundled"], "methods": ["oga"]},
    ]
    (tmp_path / "grid.json").write_text(json.dumps(blocks))
    return Plan(
        grid=str(tmp_path / "grid.json"),
        root=tmp_path,
        out=tmp_path / "runs",
        features=None,
        device="cpu",
        workers=0,
        deadline=float("inf"),
        only="",
    )


def test_a_later_block_is_run_later_though_its_stream_came_before(plan: Plan) -> None:
    streams = [
        [(spec.dataset, spec.method) for spec in runs] for runs in read_streams(plan)
    ]
    assert streams == [
        [("bundled", "zero_shot"), ("bundled", "tda")],
        [("bundled@fog:5", "zero_shot"), ("bundled@fog:5", "tda")],
        [("bundled", "oga")],
    ]


@pytest.mark.slow
def test_processes_share_the_streams_and_what_is_finished_is_packed(
    plan: Plan, tmp_path: Path
) -> None:
    packer = Packer("grid", plan.root, plan.out, tmp_path / "packed")
    run(plan, 2, packer)
    records = unpack_records(tmp_path / "packed/grid.json")
    assert sorted(record.method for record in records) == [
        "oga",
        "tda",
        "tda",
        "zero_shot",
        "zero_shot",
    ]
    assert all(
        "repaired" in record.metrics
        for record in records
        if record.method != "zero_shot"
    )


def test_records_are_packed_as_they_come(tmp_path: Path) -> None:
    """The second time finds a run more, and counts it against the zero-shot of the first."""
    runs = tmp_path / "runs"
    packer = Packer("grid", tmp_path, runs, tmp_path / "packed")
    make_run(runs, "zero_shot", LABELS, PLAIN)
    make_run(runs, "oga", LABELS, PLAIN, status="running")
    packer.update()
    make_run(runs, "tda", LABELS, ADAPTED)
    packer.update()
    plain, tda = unpack_records(tmp_path / "packed/grid.json")
    assert (plain.method, tda.method) == ("zero_shot", "tda")
    assert (tda.metrics["repaired"], tda.metrics["broken"]) == (1, 2)
    with np.load(tmp_path / "packed/grid.npz") as classes:
        assert classes[tda.id].tolist() == ADAPTED, "in the order of the images' names"
