"""One process at a time in a folder; the system lets go of the lock when a process dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: runs there are not protected from one another
    fcntl = None  # type: ignore[assignment]


class BusyError(RuntimeError):
    """Another process works in the folder."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, or raise :class:`BusyError` at once."""
    with (folder / ".lock").open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(f"another process is working on {folder}") from None
        yield
