"""Prediction runs on a Ray cluster: the table of a run on one machine, whoever is killed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cliquetta.errors import UserError
from cliquetta.inference import parts
from cliquetta.inference.bulk import predict
from cliquetta.inference.parts import Lane
from cliquetta.inference.ray_driver import RayCluster, share_out
from cliquetta.inference.rows import PredictionRun
from cliquetta.methods.building.registry import create_method, method_config
from cliquetta.methods.building.state import read_header
from cliquetta.model.clip import CLIP
from tests._helpers.local_ray import local_ray
from tests._helpers.trees import camera_list, table_rows
from tests.inference.conftest import NAMES, Predict

pytestmark = pytest.mark.slow  # starts Ray

IMAGES = 46


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Workers on this machine; all tests here share them."""
    with local_ray(3):
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of images of three cameras, interleaved; one cannot be read."""
    folder = tmp_path_factory.mktemp("photos")
    cameras = [("north", "yard/2", "")[number % 7 % 3] for number in range(IMAGES)]
    return camera_list(folder, cameras, [5])


@pytest.fixture(scope="module")
def run(
    table: Path, tiny_clip: CLIP, tmp_path_factory: pytest.TempPathFactory
) -> Predict:
    folder = tmp_path_factory.mktemp("tables")

    def call(out: str | Path, **changes: object) -> PredictionRun:
        settings = {
            "model": tiny_clip,
            "method": ["tda", "tent"],
            "batch_size": 4,
            "workers": 0,
        }
        settings |= {"out": folder / out, **changes}
        return predict([table], NAMES, **settings)  # type: ignore[arg-type]

    return call


def test_times_of_actors_fit_into_the_run(run: Predict) -> None:
    """Each of two actors works or waits, one after the other, for as long as the run at most."""
    begun = time.perf_counter()
    done = run("times.csv", cluster=RayCluster(actors=2))
    passed = time.perf_counter() - begun
    assert done.busy > 0
    assert done.waited >= 0
    assert done.busy + done.waited < 2 * passed


def test_progress_is_images_done_then_all_then_skipped(run: Predict) -> None:
    """Of 46 images in batches of four, the sixth of which cannot be read."""
    calls: list[tuple[int, int, int]] = []
    run(
        "progress.csv",
        cluster=RayCluster(actors=1),
        on_progress=lambda done, total, skipped: calls.append((done, total, skipped)),
    )
    assert calls[:3] == [(4, 46, 0), (8, 46, 1), (12, 46, 1)]
    assert calls[-1] == (46, 46, 1)


@pytest.fixture(scope="module")
def two_actors(
    run: Predict, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PredictionRun]:
    """The state that two actors learned, and their run."""
    state = tmp_path_factory.mktemp("state") / "tda.safetensors"
    once = {"method": "tda", "state": state, "reject": 0.5}
    return state, run("two.csv", cluster=RayCluster(actors=2), **once)


def test_actors_predict_as_shards_do(
    run: Predict, two_actors: tuple[Path, PredictionRun]
) -> None:
    done = two_actors[1]
    assert (done.images, done.skipped, done.before) == (IMAGES, 1, 0) and done.busy > 0
    expected = []
    for i in (1, 2):
        shard = run("plain.csv", method="tda", shard=(i, 2), reject=0.5)
        expected += table_rows(Path(str(shard.out)))
    out = Path(str(done.out))
    assert table_rows(out) == expected
    assert {row["rejected"] for row in expected} == {"true", "false", ""}
    assert not out.with_name("two.csv.parts").exists()


def test_several_actors_learn_one_state(
    run: Predict, two_actors: tuple[Path, PredictionRun], tmp_path: Path
) -> None:
    """TDA's caches are those of one actor that saw everything."""
    run("one.csv", method="tda", state=tmp_path / "one.safetensors")
    actual = load_file(two_actors[0])
    expected = load_file(tmp_path / "one.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value)
    assert read_header(two_actors[0])["notes"] == {"images": IMAGES - 1}


def test_groups_predict_as_they_do_here(run: Predict, tmp_path: Path) -> None:
    """Wherever a group runs; tests/inference/test_bulk.py runs each group alone."""
    names = ["(empty)", "north", "yard%2F2"]
    for where, cluster in (("here", None), ("there", RayCluster(actors=2))):
        once = {"method": "tda", "group_by": "camera", "cluster": cluster}
        run(tmp_path / f"{where}.csv", **once, state=tmp_path / where)
        assert sorted(path.stem for path in (tmp_path / where).iterdir()) == names
    assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
    for name in names:
        here, there = (
            tmp_path / where / f"{name}.safetensors" for where in ("here", "there")
        )
        learned = load_file(there)
        assert all(
            torch.equal(value, learned[key]) for key, value in load_file(here).items()
        )
        assert read_header(there)["notes"] == read_header(here)["notes"]


def kill_an_actor() -> None:
    """``kill -9`` of an actor of Ray Data that belongs to this process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            raylet = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            owner = int(
                Path(f"/proc/{raylet}/stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
        if title.startswith(b"ray::MapWorker") and owner == os.getpid():
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError("no actor is running")


def test_an_actor_that_is_killed_is_replaced(
    run: Predict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it was idle, as here, where it waits for images; table and verdict stay the same."""
    monkeypatch.setattr(parts, "PART_ROWS", 8)
    methods = {"method": ["tent", "domain_norm"]}
    here = run("here.csv", **methods)
    killed: list[int] = []

    def strike(done: int, total: int, skipped: int) -> None:
        if done >= 12 and not killed:
            killed.append(done)
            kill_an_actor()

    there = run(
        "there.csv", cluster=RayCluster(actors=1), on_progress=strike, **methods
    )
    assert killed and there.images == IMAGES
    assert Path(str(there.out)).read_bytes() == Path(str(here.out)).read_bytes()
    assert there.health["domain_norm"] == here.health["domain_norm"]


def test_an_interrupted_run_continues(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last part was half written, and where the cluster is gone."""
    monkeypatch.setattr(parts, "PART_ROWS", 4)
    expected = tmp_path / "expected.csv"
    out = tmp_path / "out.csv"
    run(expected, group_by="camera")

    def stop(done: int, total: int, skipped: int) -> None:
        if done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out, group_by="camera", cluster=RayCluster(actors=1), on_progress=stop)
    folder = tmp_path / "out.csv.parts"
    assert list(folder.glob("*.jsonl")) and not out.exists()
    (folder / ".000000000044-000000000046.jsonl.x.tmp").write_text('{"path": "half')
    assert 0 < run(out, group_by="camera").before < IMAGES
    assert out.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"cluster": RayCluster(actors=3)}, "4 CPU cores"),
        ({"cluster": RayCluster(gpus_per_actor=0.5)}, "with 0"),
        ({"group_by": "lens"}, "lens"),
        ({"group_by": "camera", "shard": (1, 2)}, "cut groups"),
        (
            {"cluster": RayCluster(actors=2), "method": "ramen", "state": Path("s")},
            "join",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_first(
    run: Predict, tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    with pytest.raises(UserError, match=match):
        run(tmp_path / "out.csv", **changes)
    assert not (tmp_path / "out.csv.parts").exists()


def test_bad_input_in_an_actor_ends_the_run_with_its_error(
    run: Predict, tiny_clip: CLIP
) -> None:
    adapter = create_method(
        "tent", tiny_clip, NAMES, method_config("tent", None, {"lr": "1e30"})
    )
    with pytest.raises(UserError, match="learning rate"):
        run("bad.csv", method=adapter, cluster=RayCluster(actors=1))


def test_lanes_are_shared_out_by_size() -> None:
    sizes = {Lane(0, 50): 50, Lane(50, 60): 10, Lane(60, 100): 40, Lane(100, 101): 1}
    first = [Lane(0, 50), Lane(100, 101)]
    second = [Lane(60, 100), Lane(50, 60)]
    assert share_out(sizes, 2) == [first, second]
    assert share_out({Lane(0, 5): 5}, 3) == [[Lane(0, 5)]]


@pytest.mark.filterwarnings("ignore:sub-folders are named after classes")
def test_folders_of_classes_are_shuffled_over_the_actors(
    run: Predict, tiny_clip: CLIP, class_folders: Path, tmp_path: Path
) -> None:
    """One actor predicts as this process does; two give every row its place in the list."""
    settings: dict[str, Any] = {"model": tiny_clip, "method": "tda", "batch_size": 4}
    settings |= {"labels": "folder", "workers": 0}
    here = predict([class_folders], NAMES, out=tmp_path / "here.csv", **settings)
    one = RayCluster(actors=1)
    there = predict(
        [class_folders], NAMES, out=tmp_path / "there.csv", cluster=one, **settings
    )
    assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
    assert there.scores == here.scores and there.shuffled
    two = RayCluster(actors=2)
    predict([class_folders], NAMES, out=tmp_path / "two.csv", cluster=two, **settings)
    listed = [row["path"] for row in table_rows(tmp_path / "here.csv")]
    rows = table_rows(tmp_path / "two.csv")
    assert [row["path"] for row in rows] == listed
    plain = [row["zero_shot_prediction"] for row in table_rows(tmp_path / "here.csv")]
    assert [row["zero_shot_prediction"] for row in rows] == plain
