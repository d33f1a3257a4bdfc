"""Files that survive crashes and concurrent processes: atomic replacement, exclusive folders."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from cliquetta.errors import BusyError


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
    name = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield name
    finally:
        name.unlink(missing_ok=True)


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
