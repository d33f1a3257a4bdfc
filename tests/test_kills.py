"""Everything that writes, stopped at every file operation and started again: the same files.

The files are compared byte for byte with those of a run that was never stopped. Only
clocks are left out, and counts of starts: the time in a record. Of sessions replies and
states are compared.
"""

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cliquetta.data.feature_cache import FeatureBlock, TableLayout, open_table
from cliquetta.data.stream import Stream
from cliquetta.errors import UserError
from cliquetta.evaluation.evidence_log import EvidenceLimits
from cliquetta.evaluation.record import RECORD, STATE
from cliquetta.evaluation.runner import evaluate
from cliquetta.export import export_model
from cliquetta.inference import parts
from cliquetta.inference.bulk import predict
from cliquetta.inference.ray_driver import RayCluster, RayWorkers
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.database import FILE
from cliquetta.tensor_file import pack, unpack
from tests._helpers.running import Run
from tests._helpers.running import run as run
from tests._helpers.serve_setup import batch_of, local_service
from tests._helpers.sqlite_stops import can_stop, stop_sqlite_at
from tests._helpers.stopping import KILLED, in_fork, tree
from tests._helpers.streaming import made_up_dataset
from tests._helpers.trees import noise, numbered_photos, table_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(os, "fork") or not Path("/proc/self/fd").exists(), reason="fork"
    ),
]

NAMES = ("airplane", "cat", "frog")
IMAGES = 6
BATCH = 2
Tree = dict[str, bytes | None]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    numbered_photos(folder, IMAGES, [5])
    return folder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where that is possible: hundreds of runs wait for a disk longer than they work."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else None
    ) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_ROWS", BATCH)


def check(
    write: Callable[[Path], object],
    folder: Path,
    compared: Callable[[Path], Tree] = tree,
    prepare: Callable[[Path], object] = Path.mkdir,
    name: str = "",
) -> None:
    """Stop ``write`` at its every file operation, start it again, and compare what is there.

    Only operations on files with ``name`` in their path count. A second start may say
    that the output exists: then the first had come to its end.
    """

    prepare(folder)
    write(folder)  # in this process: forks find everything imported and compiled
    wanted = compared(folder)
    failures = []
    for number in count():
        shutil.rmtree(folder)
        prepare(folder)
        code = in_fork(lambda: write(folder), folder, number, name)
        if code == 0:
            break
        assert code == KILLED
        with suppress(UserError):
            write(folder)
        actual = compared(folder)
        if actual != wanted:
            differing = {name for name, _ in actual.items() ^ wanted.items()}
            failures.append(f"stopped at operation {number}: {sorted(differing)}")
    print(f"{number} operations, {len(failures)} with other files afterwards")
    assert not failures, "\n".join(failures)
    assert number > 2


@pytest.fixture
def predicting(
    photos: Path, tiny_clip: CLIP
) -> Callable[..., Callable[[Path], object]]:
    """A builder of functions that predict into a folder; file names are relative to it."""

    def make(
        images: Any = None, out: str = "out.csv", state: str = "", **more: Any
    ) -> Any:
        settings = {
            "model": tiny_clip,
            "batch_size": BATCH,
            "workers": 0,
            "method": "tda",
            **more,
        }

        def write(folder: Path) -> None:
            saved = folder / state if state else None
            given = [photos] if images is None else images
            predict(given, NAMES, out=folder / out, state=saved, **settings)

        return write

    return make


@pytest.mark.parametrize(
    ("kind", "state", "name"),
    [
        ("csv", "domain_norm", ""),
        ("csv", None, ""),
        # formats differ in nothing but how the table is made
        ("jsonl", "tda", "table"),
        ("parquet", "tda", "table"),
    ],
)
def test_predict(
    kind: str, state: str | None, name: str, predicting: Any, tmp_path: Path
) -> None:
    method: Any = {"method": ["tda", "tent"]}
    if state is not None:
        method = {"method": state, "state": "state.safetensors"}
    check(predicting(out=f"out.{kind}", **method), tmp_path / "work", name=name)


@pytest.fixture
def class_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images in each of three folders named after the classes, one damaged."""
    folder = tmp_path_factory.mktemp("labelled")
    for name in NAMES:
        (folder / name).mkdir()
    noise(
        folder, [f"{name}/{number}.png" for name in NAMES for number in range(2)], [5]
    )
    return folder


@pytest.mark.filterwarnings("ignore:sub-folders are named after classes")
def test_predict_shuffled_with_labels(
    class_folders: Path, predicting: Any, tmp_path: Path
) -> None:
    write = predicting([class_folders], state="state.safetensors", labels="folder")
    check(write, tmp_path / "work")


class Inline:
    """Ray Data as the driver uses it, in this process: tables flow through functions and actors."""

    context: Any = SimpleNamespace(execution_options=SimpleNamespace())

    def __init__(self, tables: Iterable[Any]) -> None:
        self.tables = tables

    def map_batches(
        self,
        work: Any,
        *,
        fn_args: Sequence[Any] = (),
        fn_constructor_args: Sequence[Any] = (),
        **how: Any,
    ) -> Any:
        if isinstance(work, type):
            work = work(*fn_constructor_args)
        return Inline(work(table, *fn_args) for table in self.tables)

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        return (table.to_pylist()[0] for table in self.tables)


@pytest.fixture
def inline_cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two actors without Ray: all that is written is written by the real driver."""
    ray = SimpleNamespace(
        data=SimpleNamespace(from_arrow=Inline),
        exceptions=SimpleNamespace(RayError=ConnectionError),
        put=lambda value: value,
        get=lambda value: value,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", ray.data)
    workers = partial(RayWorkers, ray, RayCluster(actors=2), actors=2, gpus=0, cores=1)
    return SimpleNamespace(connect=lambda: nullcontext(workers()))


def test_predict_on_a_cluster(
    predicting: Any, inline_cluster: Any, tmp_path: Path
) -> None:
    write = predicting(state="state", workers=None, cluster=inline_cluster)
    check(write, tmp_path / "work")


@pytest.mark.filterwarnings("ignore:sub-folders are named after classes")
def test_predict_shuffled_on_a_cluster(
    class_folders: Path, predicting: Any, inline_cluster: Any, tmp_path: Path
) -> None:
    """Its rows are in the order of the list, whichever actor predicted them."""
    folder = tmp_path / "work"
    write = predicting(
        [class_folders],
        state="state",
        labels="folder",
        workers=None,
        cluster=inline_cluster,
    )
    check(write, folder)
    listed = [
        f"{class_folders}/{name}/{number}.png" for name in NAMES for number in range(2)
    ]
    assert [row["path"] for row in table_rows(folder / "out.csv")] == listed


def test_predict_continues_a_state(predicting: Any, tmp_path: Path) -> None:
    """The state file is read at the start and replaced at the end: no image counts twice."""
    predicting(out="first.csv", state="state.safetensors")(tmp_path / "first")
    write = predicting(out="second.csv", state="state.safetensors")
    check(
        write, tmp_path / "work", prepare=partial(shutil.copytree, tmp_path / "first")
    )


def test_predict_groups(photos: Path, predicting: Any, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    rows = [
        f"{photos / f'{number}.png'},{'ab'[number % 2]}" for number in range(IMAGES)
    ]
    table.write_text("\n".join(["path,camera", *rows]))
    check(predicting([table], state="states", group_by="camera"), tmp_path / "work")


def test_predict_features(predicting: Any, tiny_clip: CLIP, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = generator.standard_normal((IMAGES, tiny_clip.embed_dim)).astype(np.float32)
    check(predicting(images, state="state.safetensors"), tmp_path / "work")


CLOCKS = (
    "seconds",
    "timed",
    "started",
    "finished",
    "resumed",
    "throughput",
    "peak_memory",
)


def without_clocks(folder: Path) -> Tree:
    """The files of runs, their records and states without times and starts."""
    files = tree(folder)
    for name, data in files.items():
        if name.endswith(RECORD) and data is not None:
            record = json.loads(data)
            files[name] = json.dumps(
                {k: v for k, v in record.items() if k not in CLOCKS}
            ).encode()
        if name.endswith(STATE) and data is not None:
            tensors, header = unpack(data, source=name, kind="state")
            header["notes"] = {
                k: v for k, v in header["notes"].items() if k not in CLOCKS
            }
            files[name] = pack(tensors, header)
    return files


def test_evaluate(tiny_clip: CLIP, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        adapter = create_method("domain_norm", tiny_clip, made_up_dataset().prompts)
        stream = Stream(
            made_up_dataset(14),
            tiny_clip.preprocess,
            batch_size=BATCH,
            views=adapter.views,
        )
        limits = EvidenceLimits(images=8, maps=2)
        evaluate(adapter, stream, out=folder, save_every=2, evidence=limits)

    check(write, tmp_path / "work", without_clocks)


def test_fit(run: Run, tiny_file: Path, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        words = (
            "--method",
            "tip_adapter",
            "--dataset",
            "bundled-fewshot",
            "--shots",
            1,
        )
        made = run(
            "fit", *words, "--model", tiny_file, "--out", folder / "tip.safetensors"
        )
        assert made.code == 0

    check(write, tmp_path / "work")


def test_export(tiny_clip: CLIP, tmp_path: Path) -> None:
    def write(folder: Path) -> None:  # ONNX files are written by the same line
        adapter = create_method("zero_shot", tiny_clip, ClassPrompts(NAMES))
        export_model(adapter, folder / "model.pt2")

    check(write, tmp_path / "work")


def test_feature_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cliquetta.data.feature_cache.SAVE_SECONDS", 0.0)
    layout = TableLayout({"model": "tiny"}, (IMAGES, 1, 3), 2)
    features = np.random.default_rng(0).standard_normal(layout.shape).astype(np.float32)

    def encode(wanted: Any) -> Iterator[FeatureBlock]:
        for rows in wanted:
            damaged = {3: "damaged"} if 3 in rows else {}
            yield FeatureBlock(features[rows.start : rows.stop], damaged)

    def write(folder: Path) -> None:
        assert (open_table(folder, layout, encode).features == features).all()

    check(write, tmp_path / "work")


@pytest.mark.skipif(not can_stop(), reason="SQLite is linked into this Python")
@pytest.mark.parametrize("torn", [False, True], ids=["between", "within"])
@pytest.mark.parametrize("method", ["domain_norm", "tda"])
def test_sessions(method: str, torn: bool, tiny_clip: CLIP, tmp_path: Path) -> None:
    """Every reply that a client got is that of a service that nobody stopped, and the state is.

    SQLite is stopped between any two of its file operations, or in the middle of what
    it writes.
    """
    folder = tmp_path / "sessions"
    replies = tmp_path / "replies"

    def serve() -> None:
        """Go on where the last service was stopped; ``replies`` are what clients know."""
        with local_service(folder, tiny_clip) as local:
            known = local.http.get("/v1/sessions").json()["sessions"]
            id = known[0]["id"] if known else local.create(method)
            done = known[0]["sequence"] if known else 0
            for number in range(max(1, done), 4):
                reply = local.predict(id, batch_of(number, 2), sequence=number)
                note = replies / f"{number}.json"
                text = json.dumps(reply["predictions"])
                assert not note.exists() or note.read_text() == text
                note.write_text(text)
            state = local.http.get(f"/v1/sessions/{id}/state")
            assert state.status_code == 200
            (replies / "state").write_bytes(state.content)

    def begin() -> None:
        for path in (folder, replies):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()

    def serve_until(number: int) -> None:
        stop_sqlite_at(number, torn=torn)
        serve()

    begin()
    serve()
    wanted = tree(replies)
    for number in count():
        begin()
        code = in_fork(partial(serve_until, number), folder)
        if code == 0:
            break
        assert code == KILLED
        serve()
        assert tree(replies) == wanted, f"stopped at operation {number}"
        with closing(sqlite3.connect(folder / FILE)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert database.execute("SELECT count(*) FROM sessions").fetchone() == (1,)
    print(f"{number} operations of SQLite")
    assert number > 40
