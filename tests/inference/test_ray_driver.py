"""Prediction runs on a Ray cluster: the table of a run on one machine, whoever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cliquetta.errors import UserError
from cliquetta.inference import parts
from cliquetta.inference.answers import PredictionRun
from cliquetta.inference.bulk import predict
from cliquetta.inference.parts import Lane
from cliquetta.inference.ray_driver import RayCluster, share_out
from cliquetta.methods.registry import create_method, method_config
from cliquetta.methods.state import read_header
from cliquetta.model.clip import CLIP
from tests._helpers.local_ray import local_ray
from tests._helpers.trees import noise, table_rows

pytestmark = pytest.mark.slow  # starts Ray

NAMES = ["airplane", "cat", "frog"]
IMAGES = 46
Predict = Callable[..., PredictionRun]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Workers on this machine; all tests here share them."""
    with local_ray(3):
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of images of three cameras, interleaved; one cannot be read."""
    folder = tmp_path_factory.mktemp("photos")
    names = [f"{place}.png" for place in range(IMAGES)]
    noise(folder, names)
    cameras = (("north", "yard/2", "")[place % 7 % 3] for place in range(IMAGES))
    lines = ["path,camera", *map(",".join, zip(names, cameras, strict=True))]
    (folder / "5.png").write_bytes(b"damaged")
    (folder / "list.csv").write_text("\n".join(lines))
    return folder / "list.csv"


@pytest.fixture
def run(table: Path, tiny_clip: CLIP, tmp_path: Path) -> Predict:
    def call(out: str, **changes: object) -> PredictionRun:
        settings = {"model": tiny_clip, "method": ["tda", "tent"], "batch_size": 4, "workers": 0}
        settings |= {"out": tmp_path / out, **changes}
        return predict([table], NAMES, **settings)  # type: ignore[arg-type]

    return call


def test_actors_answer_as_shards_do(run: Predict, tmp_path: Path) -> None:
    done = run("ray.csv", cluster=RayCluster(actors=2), reject=0.5)
    assert (done.images, done.skipped, done.before) == (IMAGES, 1, 0)
    assert done.busy > 0
    expected = []
    for i in (1, 2):
        run("plain.csv", shard=(i, 2), reject=0.5)
        expected += table_rows(tmp_path / f"plain.{i}-of-2.csv")
    assert table_rows(tmp_path / "ray.csv") == expected
    assert {row["tent_rejected"] for row in expected} == {"true", "false", ""}
    assert not (tmp_path / "ray.csv.parts").exists()


def test_a_verdict_comes_from_the_actors(run: Predict) -> None:
    done = run("out.csv", method="domain_norm", cluster=RayCluster(actors=1))
    assert done.health["domain_norm"] == run("here.csv", method="domain_norm").health["domain_norm"]


def test_groups_answer_as_each_alone(
    run: Predict, table: Path, tiny_clip: CLIP, tmp_path: Path
) -> None:
    """Wherever a group runs; its table and its state are those of a run over its images."""
    states = tmp_path / "states"
    once = {"method": "tda", "group_by": "camera"}
    run("here.csv", **once)
    run("ray.csv", **once, state=states, cluster=RayCluster(actors=2))
    assert (tmp_path / "ray.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
    listed = table_rows(table)
    found = table_rows(tmp_path / "ray.csv")
    for group, file in (("north", "north"), ("yard/2", "yard%2F2"), ("", "_")):
        alone = table.with_name(f"{file}.csv")
        members = [row for row in listed if row["camera"] == group]
        lines = [f"{row['path']},{group}" for row in members]
        alone.write_text("\n".join(["path,camera", *lines]))
        state = tmp_path / f"{file}.safetensors"
        out = tmp_path / f"{file}.out.csv"
        settings = {"method": "tda", "model": tiny_clip, "batch_size": 4, "workers": 0}
        predict(alone, NAMES, **settings, out=out, state=state)  # type: ignore[arg-type]
        there = load_file(states / f"{file}.safetensors")
        assert all(torch.equal(value, there[name]) for name, value in load_file(state).items())
        assert read_header(state)["notes"] == read_header(states / f"{file}.safetensors")["notes"]
        kept = [row for row in found if row["camera"] == group]
        assert kept == table_rows(out) and len(kept) == len(members) > 5


def kill_an_actor() -> None:
    """``kill -9`` of an actor of Ray Data that belongs to this process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            raylet = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            owner = int(Path(f"/proc/{raylet}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if title.startswith(b"ray::MapWorker") and owner == os.getpid():
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError("no actor is running")


def test_an_actor_that_is_killed_is_replaced(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", 8)
    run("whole.csv")
    killed: list[int] = []

    def strike(done: int, total: int, skipped: int) -> None:
        if done >= 12 and not killed:
            killed.append(done)
            kill_an_actor()

    done = run("out.csv", cluster=RayCluster(actors=1), on_progress=strike)
    assert killed and done.images == IMAGES
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_a_run_that_was_stopped_continues(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last part was half written, and where the cluster is gone."""
    monkeypatch.setattr(parts, "PART_ROWS", 4)
    run("whole.csv", group_by="camera")

    def stop(done: int, total: int, skipped: int) -> None:
        if done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("out.csv", group_by="camera", cluster=RayCluster(actors=2), on_progress=stop)
    folder = tmp_path / "out.csv.parts"
    assert list(folder.glob("*.jsonl")) and not (tmp_path / "out.csv").exists()
    (folder / ".000000000044-000000000046.jsonl.x.tmp").write_text('{"path": "half')
    done = run("out.csv", group_by="camera")
    assert 0 < done.before < IMAGES
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_what_several_actors_learned_is_one_state(run: Predict, tmp_path: Path) -> None:
    """TDA's caches are those of one actor that saw everything."""
    run("plain.csv", method="tda", state=tmp_path / "plain.safetensors")
    state = tmp_path / "ray.safetensors"
    run("ray.csv", method="tda", state=state, cluster=RayCluster(actors=2))
    found, wanted = load_file(state), load_file(tmp_path / "plain.safetensors")
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    assert read_header(state)["notes"] == {"images": IMAGES - 1}


def test_what_cannot_be_run_is_refused_first(run: Predict, tmp_path: Path) -> None:
    for changes, match in (
        ({"cluster": RayCluster(actors=3)}, "need 4 CPU cores, the cluster has 3"),
        ({"cluster": RayCluster(gpus_per_actor=0.5)}, "cluster with 0: lower"),
        ({"group_by": "lens"}, "no column 'lens' to group by in the input: found path, camera"),
        ({"group_by": "camera", "shard": (1, 2)}, "cut groups apart"),
        (
            {"cluster": RayCluster(actors=2), "method": "ramen", "state": tmp_path / "s"},
            "cannot join",
        ),
    ):
        with pytest.raises(UserError, match=match):
            run("out.csv", **changes)
        assert not (tmp_path / "out.csv.parts").exists()


def test_bad_input_in_an_actor_ends_the_run_with_its_sentence(
    run: Predict, tiny_clip: CLIP, tmp_path: Path
) -> None:
    adapter = create_method("tent", tiny_clip, NAMES, method_config("tent", None, {"lr": "1e30"}))
    with pytest.raises(UserError, match="lower its learning rate"):
        run("out.csv", method=adapter, cluster=RayCluster(actors=1))


def test_lanes_are_shared_out_by_size() -> None:
    sizes = {Lane(0, 50): 50, Lane(50, 60): 10, Lane(60, 100): 40, Lane(100, 101): 1}
    assert share_out(sizes, 2) == [
        [Lane(0, 50), Lane(100, 101)],
        [Lane(60, 100), Lane(50, 60)],
    ]
    assert share_out({Lane(0, 5): 5}, 3) == [[Lane(0, 5)]]
