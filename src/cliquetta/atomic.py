"""Files that survive crashes and concurrent processes: atomic replacement, exclusive folders."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from cliquetta.errors import BusyError


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``; after a crash at any moment it holds one of both, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
    sync_folder(path.parent)


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
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, or raise :class:`BusyError` at once; a dead process holds none."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise BusyError(f"another process is working on {folder}") from None
    try:
        yield
    finally:
        lock.release()
