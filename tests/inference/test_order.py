"""Folders of classes are predicted shuffled, rows stay in the order of the list."""

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest

from cliquetta.inference import parts
from cliquetta.inference.order import SHUFFLED
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from tests._helpers.stopping import KILLED, in_fork
from tests._helpers.trees import table_rows
from tests.inference.conftest import NAMES, Predict

DAMAGED = "cat/3.png"


def listed(folder: Path) -> list[str]:
    """The images in the order in which a folder lists them."""
    return [(folder / name / f"{n}.png").as_posix() for name in NAMES for n in range(8)]


def shuffled(paths: list[str], seed: int, first: int = 0) -> list[str]:
    """The order that the seed gives, from the rule alone: by a hash of seed and number."""

    def draw(number: int) -> bytes:
        return hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()

    numbers = range(first + 1, first + len(paths) + 1)
    return [paths[number - first - 1] for number in sorted(numbers, key=draw)]


def by_hand(model: CLIP, order: list[str]) -> dict[str, tuple[str, float]]:
    """Predictions of ``tda`` for batches of four, in an order."""
    method = create_method("tda", model, NAMES)
    found = {}
    for first in range(0, len(order), 4):
        batch = [
            path for path in order[first : first + 4] if not path.endswith(DAMAGED)
        ]
        prediction = method.predict(batch)
        for path, ranked in zip(batch, prediction.top(1), strict=True):
            found[path] = ranked[0]
    return found


def check_rows(
    rows: list[dict[str, Any]], expected: dict[str, tuple[str, float]]
) -> None:
    for row in rows:
        if row["error"]:
            assert row["path"].endswith(DAMAGED)
            continue
        name, probability = expected[row["path"]]
        assert row["prediction"] == name
        assert float(row["probability"]) == pytest.approx(probability, abs=1e-6)


@pytest.mark.parametrize("out", [None, "out.csv"])
def test_images_are_predicted_in_a_seeded_order_and_listed_as_they_were(
    run: Predict, class_folders: Path, tiny_clip: CLIP, tmp_path: Path, out: str | None
) -> None:
    target = tmp_path / out if out else None
    with pytest.warns(UserWarning, match="--order listed") as said:
        done = run(class_folders, method="tda", seed=5, out=target, keep_rows=True)
    assert [str(warning.message) for warning in said] == [SHUFFLED]
    assert done.shuffled
    assert [row["path"] for row in done.rows] == listed(class_folders)
    check_rows(done.rows, by_hand(tiny_clip, shuffled(listed(class_folders), seed=5)))
    if target is not None:
        assert [row["path"] for row in table_rows(target)] == listed(class_folders)


def test_the_order_of_the_list_is_kept_on_request(
    run: Predict, class_folders: Path, tiny_clip: CLIP
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = run(class_folders, method="tda", order="listed", out=None)
    assert not done.shuffled
    check_rows(done.rows, by_hand(tiny_clip, listed(class_folders)))


def test_where_order_tells_nothing_it_stays(
    run: Predict, class_folders: Path, tmp_path: Path
) -> None:
    """Other folders, one class alone, a table that mixes classes, a method without memory."""
    table = tmp_path / "mixed.csv"
    mixed = [class_folders / name / f"{n}.png" for n in range(8) for name in NAMES]
    table.write_text("\n".join(["path", *map(str, mixed)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not run(class_folders / "cat", method="tda", out=None).shuffled
        assert not run(table, method="tda", out=None).shuffled
        assert not run(class_folders, method="zero_shot", out=None).shuffled
    (tmp_path / "cameras").mkdir()
    for number, name in enumerate(NAMES):
        (tmp_path / "cameras" / f"camera {number}").symlink_to(class_folders / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not run(tmp_path / "cameras", method="tda", out=None).shuffled
    assert run(tmp_path / "cameras", method="tda", order="shuffled", out=None).shuffled


def test_a_table_that_is_sorted_by_class_is_shuffled(
    run: Predict, class_folders: Path, tmp_path: Path
) -> None:
    table = tmp_path / "sorted.csv"
    table.write_text("\n".join(["path", *listed(class_folders)]))
    with pytest.warns(UserWarning, match="class by class"):
        assert run(table, method="tda", out=None).shuffled


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_stopped_run_ends_as_if_it_never_had_been(
    run: Predict, class_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and state, wherever it is killed: also while rows are sorted."""
    monkeypatch.setattr(parts, "PART_ROWS", 4)
    out = tmp_path / "out.csv"
    state = tmp_path / "state.safetensors"
    settings: dict[str, Any] = {
        "images": class_folders,
        "method": "tda",
        "state": state,
    }
    run(**settings)
    wanted = out.read_bytes(), state.read_bytes()
    before = set()
    for operation in (30, 45, 60, 75, 90):
        out.unlink()
        state.unlink()
        assert in_fork(lambda: run(**settings), tmp_path, operation) == KILLED
        before.add(run(**settings).before)
        assert (out.read_bytes(), state.read_bytes()) == wanted
        assert not (tmp_path / "out.csv.parts").exists()
    assert len(before) > 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_shards_are_parts_of_the_list_each_shuffled_in_itself(
    run: Predict, class_folders: Path, tiny_clip: CLIP, tmp_path: Path
) -> None:
    paths = listed(class_folders)
    for number in (1, 2):
        run(class_folders, method="tda", shard=(number, 2))
        rows = table_rows(tmp_path / f"out.{number}-of-2.csv")
        own = paths[12 * (number - 1) : 12 * number]
        assert [row["path"] for row in rows] == own
        order = shuffled(own, seed=0, first=12 * (number - 1))
        check_rows(rows, by_hand(tiny_clip, order))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_groups_are_shuffled_apart(
    run: Predict, class_folders: Path, tmp_path: Path
) -> None:
    """A group's rows are those of a run over it alone."""
    table = tmp_path / "table.csv"
    lines = [f"{path},{'ab'[n % 2]}" for n, path in enumerate(listed(class_folders))]
    table.write_text("\n".join(["path,camera", *lines]))
    run(table, method="tda", group_by="camera")
    rows = table_rows(tmp_path / "out.csv")
    assert [row["camera"] for row in rows] == ["a"] * 12 + ["b"] * 12
    only_a = tmp_path / "a.csv"
    only_a.write_text("\n".join(["path,camera", *lines[::2]]))
    run(only_a, method="tda", out=tmp_path / "a.out.csv")
    assert table_rows(tmp_path / "a.out.csv") == rows[:12]
