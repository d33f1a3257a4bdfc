"""Images and tables behind URLs, in tar shards and in Parquet lists: the same predictions."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cliquetta.errors import UserError
from cliquetta.inference.bulk import predict
from tests._helpers.trees import make_tar, table_rows
from tests.inference.conftest import DAMAGED, IMAGES, NAMES, Predict

Outcomes = Callable[..., list[tuple[str, str]]]  # probability and error of every image


@pytest.fixture
def bucket(photos: Path) -> Iterator[str]:
    """A copy of the photographs in fsspec's memory."""
    store = fsspec.filesystem("memory")
    store.put(str(photos), "/bucket/photos", recursive=True)
    yield "memory://bucket"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def outcomes(run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outcomes:
    monkeypatch.chdir(tmp_path)

    def call(*sources: str, **settings: Any) -> list[tuple[str, str]]:
        rows = run(list(sources), method="tda", out=None, **settings).rows
        return [(str(row["probability"] or ""), row["error"]) for row in rows]

    return call


def write_shard(path: Path, photos: Path, numbers: range) -> None:
    images = {f"{n:04d}.png": (photos / f"{n}.png").read_bytes() for n in numbers}
    make_tar(path, images | {f"{n:04d}.cls": b"1" for n in numbers})


def test_urls_are_predicted_as_files_are(
    outcomes: Outcomes, photos: Path, bucket: str
) -> None:
    expected = outcomes(str(photos))
    assert (
        expected[DAMAGED] == ("", "not an image in a known format") and expected[3][0]
    )
    fsspec.filesystem("memory").pipe_file("/bucket/photos/notes.txt", b"x")
    run = predict(f"{bucket}/photos", NAMES, model="micro", method="tda", batch_size=4)
    assert (
        run.unused == {".txt": 1}
        and run.rows[0]["path"] == "memory:///bucket/photos/0.png"
    )
    assert outcomes(f"{bucket}/photos") == expected
    assert (
        outcomes(*(f"file://{photos}/{number}.png" for number in range(IMAGES)))
        == expected
    )
    gone = outcomes(f"{bucket}/photos/0.png", str(photos / "0.png"))
    assert gone[0][1] == gone[1][1] == ""


def test_tables_at_urls_and_of_urls(
    outcomes: Outcomes, photos: Path, bucket: str, tmp_path: Path
) -> None:
    expected = outcomes(str(photos))
    lines = ["path,camera", *(f"photos/{number}.png,x" for number in range(IMAGES))]
    with fsspec.open(f"{bucket}/list.csv", "w") as file:
        file.write("\n".join(lines))
    assert outcomes(f"{bucket}/list.csv") == expected
    urls = (f"{bucket}/photos/{number}.png" for number in range(IMAGES))
    (tmp_path / "urls.csv").write_text("\n".join(["path", *urls]))
    assert outcomes("urls.csv") == expected
    (tmp_path / "gone.csv").write_text(f"path\n{bucket}/gone.png\n")
    assert outcomes("gone.csv") == [("", "no such file")]


def test_parquet_lists(
    outcomes: Outcomes, photos: Path, bucket: str, tmp_path: Path
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "photos").symlink_to(photos)
    paths = [f"photos/{number}.png" for number in range(IMAGES)]
    table = pyarrow.table(
        {"image": paths, "hour": list(range(IMAGES)), "note": [None] * IMAGES}
    )
    parquet.write_table(table, tmp_path / "list.parquet")
    fsspec.filesystem("memory").put(
        str(tmp_path / "list.parquet"), "/bucket/list.parquet"
    )
    expected = outcomes(str(photos))
    assert outcomes("list.parquet") == outcomes(f"{bucket}/list.parquet") == expected
    predict("list.parquet", NAMES, model="micro", method="zero_shot", out="out.csv")
    hours = [row["hour"] for row in table_rows(tmp_path / "out.csv")]
    assert hours == [str(i) for i in range(IMAGES)]
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(UserError, match="Parquet"):
        outcomes("bad.parquet")


def test_tar_shards(
    outcomes: Outcomes, photos: Path, bucket: str, tmp_path: Path
) -> None:
    write_shard(tmp_path / "s-00.tar", photos, range(4))
    write_shard(tmp_path / "s-01.tar", photos, range(4, IMAGES))
    fsspec.filesystem("memory").put(str(tmp_path / "s-01.tar"), "/bucket/s-01.tar")
    expected = outcomes(str(photos))
    assert outcomes("s-{00..01}.tar") == expected
    assert outcomes("s-00.tar", f"{bucket}/s-01.tar") == expected
    rows = predict("s-00.tar", NAMES, model="micro", method="zero_shot").rows
    assert [row["path"] for row in rows] == [
        f"s-00.tar/{number:04d}.png" for number in range(4)
    ]
    with pytest.raises(UserError, match="s-02"):
        outcomes("s-{00..02}.tar")


def test_output_at_a_url(run: Predict, bucket: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run(out="local.csv")
        run(out=f"{bucket}/new/out.csv")
        wanted = (tmp_path / "local.csv").read_bytes()
        assert fsspec.filesystem("memory").cat("/bucket/new/out.csv") == wanted
        assert not list(tmp_path.glob("*.parts"))
        with pytest.raises(UserError, match="--overwrite"):
            run(out=f"{bucket}/new/out.csv")
        run(out=f"{bucket}/new/out.csv", overwrite=True)
        run(out=f"{bucket}/new/out.csv", shard=(2, 2))
        assert fsspec.filesystem("memory").exists("/bucket/new/out.2-of-2.csv")
        with pytest.raises(UserError, match="nowhere"):
            run(out="nowhere://x/out.csv")


def test_nothing_but_the_output_is_left_at_a_url(
    run: Predict, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(out=f"{bucket}/new/out.csv")
    assert fsspec.filesystem("memory").find("/bucket/new") == ["/bucket/new/out.csv"]
