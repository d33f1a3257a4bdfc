"""Two Ray nodes on this machine: a node is lost, the command is killed, the table is the same."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from cliquetta.inference import parts
from cliquetta.inference.bulk import predict
from cliquetta.inference.ray_driver import RayCluster
from cliquetta.model.checkpoints.native import save_model
from cliquetta.model.factory import create_model
from cliquetta.ray_connection import connected
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.trees import noise, table_rows

pytestmark = pytest.mark.slow
NAMES = ["airplane", "cat", "frog"]
IMAGES = 120
COMMAND = """
from cliquetta.inference import parts
parts.PART_ROWS = 8
from cliquetta.cli.main import app
app()
"""


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head and another node; either has room for two actors and a reader."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # a busy machine would starve them
    args: dict[str, Any] = {"num_cpus": 3, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**args, "include_dashboard": False})
    cluster.add_node(**args)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A model and a list of images of two cameras."""
    save_model(build_tiny_clip(), tmp_path / "tiny.safetensors")
    noise(tmp_path, [f"{place}.png" for place in range(IMAGES)])
    lines = ["path,camera", *(f"{place}.png,{'ab'[place % 7 % 2]}" for place in range(IMAGES))]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    return tmp_path


def test_threads_of_workers_wait_as_those_of_the_command_do(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # after the cluster was started
    with connected(nodes.address) as there:
        assert there.get(there.remote(os.getenv).remote("OMP_WAIT_POLICY")) == "PASSIVE"


def test_a_node_is_lost(
    nodes: Cluster, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 8)
    settings: dict[str, Any] = {
        "model": create_model(str(photos / "tiny.safetensors"), device="cpu")
    }
    settings |= {"method": ["tda", "tent"], "batch_size": 4, "group_by": "camera"}
    predict([photos / "list.csv"], NAMES, out=tmp_path / "whole.csv", **settings)
    ray.init(nodes.address, log_to_driver=False, logging_level=logging.ERROR)
    lost: list[int] = []

    def strike(done: int, total: int, skipped: int) -> None:
        if done >= 20 and not lost:
            lost.append(done)
            nodes.remove_node(nodes.worker_nodes.copy().pop(), allow_graceful=False)

    done = predict(
        [photos / "list.csv"],
        NAMES,
        out=tmp_path / "out.csv",
        cluster=RayCluster("auto", actors=2),
        on_progress=strike,
        **settings,
    )
    assert lost and done.images == IMAGES
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_twenty_random_kills(nodes: Cluster, photos: Path, tmp_path: Path) -> None:
    """When to kill is drawn anew for every start: after some more parts and part of a second."""
    words = ["predict", "list.csv", "--classes", ",".join(NAMES), "--model", "tiny.safetensors"]
    words += ["--method", "tda,tent", "--batch-size", "4", "--group-by", "camera", "--quiet"]

    def start(out: str, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", COMMAND, *words, "--out", out, *more]
        return subprocess.Popen(command, cwd=photos, stdout=subprocess.DEVNULL)

    assert start("whole.csv").wait() == 0
    on_ray = ("--ray", nodes.address, "--actors", "2")
    whole, parts_of = (tmp_path / "whole.csv").read_bytes(), tmp_path / "out.csv.parts"

    def finished() -> int:
        return len(list(parts_of.glob("*-*.jsonl")))

    generator, kills, resumed, complete = random.Random(0), 0, 0, 0
    while kills < 20:
        before = finished()
        process, due = start("out.csv", *on_ray), before + generator.randrange(5)
        while finished() < due and process.poll() is None:
            time.sleep(0.02)
        try:
            process.wait(generator.expovariate(1 / (0.5 if due > before else 10)))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
            resumed += before > 0
        process.wait()
        print(f"kill {kills}: {before} parts before, {finished()} after", flush=True)
        if (tmp_path / "out.csv").exists():
            assert (tmp_path / "out.csv").read_bytes() == whole
            if not (parts_of / "run.json").exists():
                complete += 1
                (tmp_path / "out.csv").unlink()
                shutil.rmtree(parts_of, ignore_errors=True)
    print(f"{resumed} of the killed runs had continued one, {complete} runs ended", flush=True)
    if not (tmp_path / "out.csv").exists() or (tmp_path / "out.csv.parts/run.json").exists():
        assert start("out.csv", *on_ray).wait() == 0
    assert (tmp_path / "out.csv").read_bytes() == whole
    assert resumed > 0
    assert len({row["path"] for row in table_rows(tmp_path / "out.csv")}) == IMAGES
