"""The folder of an unfinished run: held by one process, cleared without a trace of a run."""

import signal
from pathlib import Path

import pytest

from cliquetta.atomic import exclusive
from cliquetta.errors import BusyError
from cliquetta.inference import parts
from tests._helpers.stopping import KILLED, in_fork
from tests.inference.conftest import IMAGES, Predict


def test_two_processes_on_one_output_exclude_each_other(
    run: Predict, tmp_path: Path
) -> None:
    with exclusive(tmp_path / "out.csv.parts"), pytest.raises(BusyError):
        run()
    assert run().images == IMAGES


def test_a_folder_of_somebody_else_is_left_alone(run: Predict, tmp_path: Path) -> None:
    """Its name is that of the folder of parts."""
    inner = tmp_path / "out.csv.parts" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "notes.txt").touch()
    run()
    assert {path.name for path in inner.parent.iterdir()} == {"inner", "notes.txt"}


def test_a_run_is_given_up_completely(
    run: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it removes what another run left, it leaves nothing that looks like a run."""
    run(out=tmp_path / "complete.csv")
    monkeypatch.setattr(parts, "PART_ROWS", 4)
    assert in_fork(run, tmp_path, 24) == KILLED
    removed = iter(range(100))
    unlink = Path.unlink

    def last(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        if next(removed) == 1:
            signal.raise_signal(signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", last)
        assert in_fork(lambda: run(seed=1, overwrite=True), tmp_path) == -signal.SIGKILL
    run()
    assert (tmp_path / "out.csv").read_bytes() == (
        tmp_path / "complete.csv"
    ).read_bytes()
