"""Runs into files: stopped at any moment, they end as if they never had been."""

import errno
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cliquetta.atomic import write_atomically
from cliquetta.errors import UserError
from cliquetta.inference import parts
from cliquetta.inference.parts import Parts
from cliquetta.inference.predictor import Predictor, Reader
from cliquetta.methods.building.state import read_header
from tests._helpers.stopping import KILLED, in_fork
from tests.inference.conftest import IMAGES, Predict


@pytest.fixture
def complete(run: Predict, tmp_path: Path) -> bytes:
    """The table of a run that was never stopped."""
    run(out=tmp_path / "complete.csv")
    return (tmp_path / "complete.csv").read_bytes()


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part per batch."""
    monkeypatch.setattr(parts, "PART_ROWS", 4)


def test_a_run_is_over_before_it_leaves_its_cluster(
    run: Predict, complete: bytes, tmp_path: Path
) -> None:
    left: list[str] = []

    @contextmanager
    def connect() -> Iterator[Any]:
        yield SimpleNamespace(
            actors=1, predict=lambda work: work.predict_here()
        )  # one worker, this process
        # a cluster takes seconds to leave, in which a command may be killed
        left.extend(sorted(path.name for path in tmp_path.iterdir()))

    run(cluster=SimpleNamespace(connect=connect))
    assert left == ["complete.csv", "out.csv"]
    assert (tmp_path / "out.csv").read_bytes() == complete


@pytest.mark.parametrize("out", [None, "out.csv"])
def test_progress_is_images_done_then_all_then_skipped(
    run: Predict, tmp_path: Path, out: str | None
) -> None:
    """Of fourteen images in batches of four, the sixth of which cannot be read."""
    calls: list[tuple[int, int, int]] = []
    target = None if out is None else tmp_path / out
    run(
        out=target,
        on_progress=lambda done, total, skipped: calls.append((done, total, skipped)),
    )
    assert calls == [(4, 14, 0), (8, 14, 1), (12, 14, 1), (14, 14, 1)]


def test_a_table_is_on_disk_before_it_gets_its_name(
    run: Predict, tmp_path: Path, disk_events: list[tuple[str, str]]
) -> None:
    run()
    named = disk_events.index(("rename", "out.csv"))
    assert disk_events[named - 1] == (
        "flush",
        "table",
    )  # as it is called among the parts
    assert disk_events[named + 1] == ("flush", tmp_path.name)


@pytest.mark.parametrize(
    "later", [False, True], ids=["while adapting", "while reading"]
)
def test_an_interrupt_loses_nothing_that_was_done(
    run: Predict,
    complete: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    later: bool,
) -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background ignores it
    owner, name = (Reader, "batches") if later else (Predictor, "predict_deferred")
    original = getattr(owner, name)
    calls = []

    def ask(self: Predictor, read: Any) -> Any:
        rows = original(self, read)
        calls.append(len(read.keys))
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return rows

    def batches(self: Reader, *words: Any) -> Iterator[Any]:
        for read in original(self, *words):
            if len(calls) == 2:
                signal.raise_signal(signal.SIGINT)
            calls.append(len(read.keys))
            yield read

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, batches if later else ask)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert run().before == sum(calls) > 0
    assert (tmp_path / "out.csv").read_bytes() == complete


@pytest.mark.usefixtures("short_parts")
def test_a_full_disk_loses_nothing_that_was_done(
    run: Predict, complete: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_atomically

    def full(path: Path, data: bytes) -> None:
        if path.name.startswith("000000000004-000000000008"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_atomically", full)
        with pytest.raises(OSError, match="space"):
            run()
    assert not (tmp_path / "out.csv").exists()
    assert run().before == 4
    assert (tmp_path / "out.csv").read_bytes() == complete


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_state_file_is_as_exactly_once_as_the_rows(
    run: Predict, tmp_path: Path, overwrite: bool
) -> None:
    """Wherever a run is killed, with the scores of rejection in the state, too."""
    state = tmp_path / "state.safetensors"
    out = tmp_path / "out.csv"
    settings = {"method": "tent", "reject": 0.5, "state": state, "overwrite": overwrite}
    run(**settings)
    wanted = state.read_bytes(), out.read_bytes()
    before = []
    for operation in (40, 50, 70):
        out.unlink()
        state.unlink()
        assert in_fork(lambda: run(**settings), tmp_path, operation) == KILLED
        before.append(run(**settings).before)
        assert (state.read_bytes(), out.read_bytes()) == wanted
    assert before == [4, 8, 12]


@pytest.mark.usefixtures("short_parts")
def test_only_the_same_command_continues(run: Predict, tmp_path: Path) -> None:
    assert in_fork(run, tmp_path, 30) == KILLED
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "seed"),
        ({"batch_size": 8}, "batch size"),
        ({"top_k": 2}, "top k"),
        ({"method": "tda"}, "method"),
        ({"reject": 0.5}, "share to reject"),
    ]
    for change, name in changes:
        with pytest.raises(UserError, match=f"another {name}"):
            run(**change)
    features = {"images": np.ones((4, 8), np.float32), "method": "tda", "model": None}
    with pytest.raises(UserError, match="unfinished"):
        run(**features, text_features=np.eye(3, 8, dtype=np.float32))
    assert (tmp_path / "out.csv.parts/run.json").exists()
    assert run(seed=1, overwrite=True).before == 0


def test_an_existing_table_is_not_overwritten(run: Predict, tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("mine")
    with pytest.raises(UserError, match="--overwrite"):
        run()
    assert (tmp_path / "out.csv").read_text() == "mine"
    run(overwrite=True)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == IMAGES + 1


def test_files_that_cannot_be_written_are_refused_first(
    run: Predict, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"method": "tda", "state": tmp_path / "file" / "x"}, "cannot write"),
        ({"method": "tda", "state": tmp_path / "out.csv"}, "one file"),
        ({"state": tmp_path / "x"}, "one method"),
        ({"shard": (3, 2)}, "2/8"),
        ({"method": ["tda", "tda"]}, "twice"),
    ]
    for change, match in changes:
        with pytest.raises(UserError, match=match):
            run(**change)


def test_shards_cover_the_list_once(run: Predict, tmp_path: Path) -> None:
    run(method="zero_shot", out=tmp_path / "all.csv")
    rows: list[str] = []
    for i in (1, 2, 3):
        run(method="zero_shot", shard=(i, 3))
        rows += (tmp_path / f"out.{i}-of-3.csv").read_text().splitlines()[1:]
    assert rows == (tmp_path / "all.csv").read_text().splitlines()[1:]


def test_an_empty_shard_keeps_its_state(run: Predict, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    for i in range(1, IMAGES + 1):
        run(method="tda", state=state, shard=(i, IMAGES))
    assert read_header(state)["notes"]["images"] == IMAGES - 1  # one is damaged


def test_a_run_that_ends_while_the_same_one_begins_is_not_repeated(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: Callable[[Parts], AbstractContextManager[None]] = Parts.held

    def late(self: Parts) -> AbstractContextManager[None]:
        monkeypatch.setattr(Parts, "held", held)
        run()
        return held(self)

    monkeypatch.setattr(Parts, "held", late)
    with pytest.raises(UserError, match="exists"):
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_without_groups_the_state_is_one_file(run: Predict, tmp_path: Path) -> None:
    run(method="tda", state=tmp_path / "learned")
    assert read_header(tmp_path / "learned")["method"] == "tda"
