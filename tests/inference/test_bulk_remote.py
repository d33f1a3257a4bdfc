"""Images and tables behind URLs, in tar shards and in Parquet lists: the same answers."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cliquetta.errors import UserError
from cliquetta.inference.bulk import predict
from cliquetta.model.clip import CLIP
from tests._helpers.trees import noise, table_rows

NAMES = ["airplane", "cat", "frog"]
IMAGES = 9
Answers = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    noise(folder, [f"{place}.png" for place in range(IMAGES)])
    (folder / "4.png").write_bytes(b"damaged")
    (folder / "notes.txt").write_text("x")
    return folder


@pytest.fixture
def bucket(photos: Path) -> Iterator[str]:
    """The same files in fsspec's memory."""
    store = fsspec.filesystem("memory")
    store.put(str(photos), "/bucket/photos", recursive=True)
    yield "memory://bucket"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def answers(tiny_clip: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    monkeypatch.chdir(tmp_path)

    def call(*sources: str, **settings: Any) -> list[tuple[str, str]]:
        settings |= {"method": "tda", "model": tiny_clip, "batch_size": 4}
        rows = predict(list(sources), NAMES, **settings).rows
        return [
            ("" if row.get("probability") is None else str(row["probability"]), row["error"])
            for row in rows
        ]

    return call


def write_tar(path: Path, photos: Path, places: range) -> None:
    with tarfile.open(path, "w") as archive:
        for place in places:
            archive.add(photos / f"{place}.png", f"{place:04d}.png")
            label = tarfile.TarInfo(f"{place:04d}.cls")
            label.size = 1
            archive.addfile(label, io.BytesIO(b"1"))


def test_urls_answer_as_files_do(answers: Answers, photos: Path, bucket: str) -> None:
    expected = answers(str(photos))
    assert expected[4] == ("", "not an image in a known format") and expected[3][0]
    run = predict(f"{bucket}/photos", NAMES, model="micro", method="tda", batch_size=4)
    assert run.unused == {".txt": 1} and run.rows[0]["path"] == "memory:///bucket/photos/0.png"
    assert answers(f"{bucket}/photos") == expected
    assert answers(*(f"file://{photos}/{place}.png" for place in range(IMAGES))) == expected
    gone = answers(f"{bucket}/photos/0.png", str(photos / "0.png"))
    assert gone[0][1] == gone[1][1] == ""


def test_tables_at_urls_and_of_urls(
    answers: Answers, photos: Path, bucket: str, tmp_path: Path
) -> None:
    expected = answers(str(photos))
    lines = ["path,camera", *(f"photos/{place}.png,x" for place in range(IMAGES))]
    with fsspec.open(f"{bucket}/list.csv", "w") as file:
        file.write("\n".join(lines))
    assert answers(f"{bucket}/list.csv") == expected
    (tmp_path / "urls.csv").write_text(
        "\n".join(["path", *(f"{bucket}/photos/{place}.png" for place in range(IMAGES))])
    )
    assert answers("urls.csv") == expected
    (tmp_path / "gone.csv").write_text(f"path\n{bucket}/gone.png\n")
    assert answers("gone.csv") == [("", "no such file")]


def test_parquet_lists(answers: Answers, photos: Path, bucket: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = [f"photos/{place}.png" for place in range(IMAGES)]
    table = pyarrow.table({"image": paths, "hour": list(range(IMAGES)), "note": [None] * IMAGES})
    parquet.write_table(table, tmp_path / "list.parquet")
    fsspec.filesystem("memory").put(str(tmp_path / "list.parquet"), "/bucket/list.parquet")
    expected = answers(str(photos))
    assert answers("list.parquet") == answers(f"{bucket}/list.parquet") == expected
    predict("list.parquet", NAMES, model="micro", method="zero_shot", out="out.csv")
    hours = [row["hour"] for row in table_rows(tmp_path / "out.csv")]
    assert hours == [str(i) for i in range(IMAGES)]
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(UserError, match="not a Parquet file"):
        answers("bad.parquet")


def test_tar_shards(answers: Answers, photos: Path, bucket: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "s-00.tar", photos, range(4))
    write_tar(tmp_path / "s-01.tar", photos, range(4, IMAGES))
    fsspec.filesystem("memory").put(str(tmp_path / "s-01.tar"), "/bucket/s-01.tar")
    expected = answers(str(photos))
    assert answers("s-{00..01}.tar") == expected
    assert answers("s-00.tar", f"{bucket}/s-01.tar") == expected
    rows = predict("s-00.tar", NAMES, model="micro", method="zero_shot").rows
    assert [row["path"] for row in rows] == [f"s-00.tar/{place:04d}.png" for place in range(4)]
    with pytest.raises(UserError, match=r"no such file or folder: s-02\.tar"):
        answers("s-{00..02}.tar")


def test_output_at_a_url(photos: Path, bucket: str, tiny_clip: CLIP, tmp_path: Path) -> None:
    def run(out: str, **changes: Any) -> None:
        settings = {"method": "tda", "model": tiny_clip, "batch_size": 4, **changes}
        predict(photos, NAMES, out=out, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run("local.csv")
        run(f"{bucket}/new/out.csv")
        wanted = (tmp_path / "local.csv").read_bytes()
        assert fsspec.filesystem("memory").cat("/bucket/new/out.csv") == wanted
        assert not list(tmp_path.glob("*.parts"))
        with pytest.raises(UserError, match=r"out\.csv exists.*--overwrite"):
            run(f"{bucket}/new/out.csv")
        run(f"{bucket}/new/out.csv", overwrite=True)
        run(f"{bucket}/new/out.csv", shard=(2, 2))
        assert fsspec.filesystem("memory").exists("/bucket/new/out.2-of-2.csv")
        with pytest.raises(UserError, match="nowhere"):
            run("nowhere://x/out.csv")
