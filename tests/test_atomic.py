"""Files appear as any other program would make them, unless they are private; locks go."""

import os
import stat
from pathlib import Path

import pytest

from cliquetta.atomic import exclusive, write_atomically
from cliquetta.errors import BusyError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes and flock are POSIX")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_modes_follow_the_mask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "state", b"x")
        write_atomically(tmp_path / "private", b"x", 0o600)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600


def test_a_lock_is_held_by_one_and_leaves_nothing(tmp_path: Path) -> None:
    """Who opened its file before the holder removed it takes the next one, as all others do."""
    folder = tmp_path / "folder"
    lock = tmp_path / "folder/.lock"
    with exclusive(folder):
        late = os.open(lock, os.O_RDWR)
    assert not any(folder.iterdir())
    real = os.open
    opened = []

    def stale_first(path: Path, *given: int) -> int:
        opened.append(path)
        return late if len(opened) == 1 else real(path, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", stale_first)
        with exclusive(folder), pytest.raises(BusyError), exclusive(folder):
            pass
    assert len(opened) == 3
    with exclusive(folder):  # whose holder removed it with the folder
        lock.unlink()
        with exclusive(folder):
            pass
        lock.touch()
    assert lock.exists()


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a folder that nobody can write"
)
def test_errors_name_the_file_that_was_asked_for() -> None:
    with pytest.raises(OSError) as raised:
        write_atomically(Path("/proc/x.csv"), b"")
    assert raised.value.filename == "/proc/x.csv"
