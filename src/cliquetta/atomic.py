"""Files that survive crashes and concurrent processes: atomic replacement, exclusive folders."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from cliquetta.errors import BusyError

if sys.platform != "win32":
    import fcntl


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace ``path`` by ``data``; after a crash at any moment it holds one of both, whole.

    Its ``mode`` is that without what the process masks, as of any file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _written_beside(path, data, mode) as temporary:
        temporary.replace(path)
    sync_folder(path.parent)


def create_atomically(path: Path, data: bytes) -> None:
    """Create ``path`` with ``data``, whole or not at all; of several processes one succeeds.

    Raises:
        FileExistsError: There is a file already; it is unchanged.
        FileNotFoundError: Its folder does not exist.

    """
    with _written_beside(path, data, 0o600) as temporary:
        os.link(temporary, path)
    sync_folder(path.parent)


@contextlib.contextmanager
def _written_beside(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """A temporary file with ``data`` on disk, removed at the end if it is still there."""
    handle, name = _open_temporary(path, mode)
    with os.fdopen(handle, "wb") as file:  # its lock is held until it is renamed
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if sys.platform == "win32":
                file.close()
            yield Path(name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                if sys.platform == "win32" or os.path.samestat(os.fstat(handle), Path(name).stat()):
                    Path(name).unlink()


def _open_temporary(path: Path, mode: int) -> tuple[int, str]:
    """An empty file beside ``path`` that no other process writes, and its name.

    One name for each path, so that what a killed process left is used again and nothing piles up.
    """
    if sys.platform == "win32":
        return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    name = str(path.with_name(f".{path.name}.tmp"))
    while True:
        handle = os.open(name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # meanwhile another writer may have renamed it, or was killed after linking to it
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(found := os.fstat(handle), Path(name).stat()):
                    if found.st_nlink == 1:
                        os.ftruncate(handle, 0)
                        return handle, name
                    Path(name).unlink()
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make a rename durable, where folders can be opened (not on Windows)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def exclusive(path: Path, lock_file: Path | None = None) -> Iterator[None]:
    """Hold the lock of a folder, or raise :class:`BusyError` at once; a dead process holds none.

    A file has its lock in a hidden ``lock_file`` beside it, which stays.
    """
    lock = FileLock(lock_file or path / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise BusyError(f"another process is working on {path}") from None
    try:
        yield
    finally:
        lock.release()
