"""Two Ray nodes on this machine: a node is lost, the command is killed, the table is the same."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from cliquetta.inference import parts
from cliquetta.inference.bulk import predict
from cliquetta.inference.ray_driver import RayCluster
from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.factory import create_model
from cliquetta.ray_connection import connected
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.trees import camera_list, table_rows
from tests.inference.conftest import NAMES

pytestmark = pytest.mark.slow
IMAGES = 40
PART = 8
NODE: dict[str, Any] = {"num_cpus": 3, "object_store_memory": 80 * 2**20}
"""Room for two actors and a reader."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A head without work, and a node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # a busy machine would starve them
        patch.setattr(parts, "PART_ROWS", PART)
        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(**NODE)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a list of images of two cameras, and the table of a run on one machine."""
    folder = tmp_path_factory.mktemp("photos")
    save_model(build_tiny_clip(), folder / "tiny.safetensors")
    camera_list(folder, ["ab"[number % 7 % 2] for number in range(IMAGES)])
    run(folder, folder / "expected.csv")
    return folder


def run(photos: Path, out: Path, **changes: Any) -> int:
    """Predict all images, both cameras by themselves; the number of images."""
    settings = {
        "batch_size": 4,
        "group_by": "camera",
        "method": ["tda", "tent"],
        **changes,
    }
    model = create_model(str(photos / "tiny.safetensors"), device="cpu")
    return predict(
        [photos / "list.csv"], NAMES, model=model, out=out, **settings
    ).images


def run_until(photos: Path, out: Path, address: str, end: int | str) -> None:
    """Be killed by ``kill -9`` at image ``end`` of a run, or just before ``end`` is written."""
    parts.PART_ROWS = PART

    def strike(done: int, total: int, skipped: int) -> None:
        if isinstance(end, int) and done >= end:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, words: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(words[1]) == end:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    run(photos, out, cluster=RayCluster(address, actors=2), on_progress=strike)


def test_a_run_that_is_killed_twice_continues(
    nodes: Cluster, photos: Path, tmp_path: Path
) -> None:
    """In the middle, and when it has continued and all but the table is there."""
    out = tmp_path / "out.csv"
    folder = tmp_path / "out.csv.parts"
    context = multiprocessing.get_context(
        "forkserver"
    )  # processes without threads of this one
    context.set_forkserver_preload([__name__])
    done: list[int] = []
    for end in (PART + 4, str(out)):
        process = context.Process(
            target=run_until, args=(photos, out, nodes.address, end)
        )
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        done.append(len(list(folder.glob("*-*.jsonl"))))
    assert 0 < done[0] < done[1] and not out.exists()
    assert run(photos, out) == IMAGES
    assert out.read_bytes() == (photos / "expected.csv").read_bytes()
    assert len({row["path"] for row in table_rows(out)}) == IMAGES
    assert not folder.exists()


def test_threads_of_workers_wait_as_those_of_the_command_do(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # after the cluster was started
    with connected(nodes.address) as there:
        assert there.get(there.remote(os.getenv).remote("OMP_WAIT_POLICY")) == "PASSIVE"


def test_a_node_is_lost_and_another_comes(
    nodes: Cluster, photos: Path, tmp_path: Path
) -> None:
    ray.init(nodes.address, log_to_driver=False, logging_level=logging.ERROR)
    begun = threading.Event()
    settings = {"cluster": RayCluster("auto", actors=2)}

    def notice(done: int, total: int, skipped: int) -> None:
        if done >= PART + 4:
            begun.set()

    with ThreadPoolExecutor(1) as other:  # nodes are started by the main thread only
        done = other.submit(
            run, photos, tmp_path / "out.csv", on_progress=notice, **settings
        )
        assert begun.wait(120)
        (node,) = nodes.worker_nodes
        nodes.remove_node(node, allow_graceful=False)
        assert not done.done()
        nodes.add_node(**NODE)
        assert done.result() == IMAGES
    assert (tmp_path / "out.csv").read_bytes() == (photos / "expected.csv").read_bytes()
