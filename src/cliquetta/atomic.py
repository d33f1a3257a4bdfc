"""Files that survive crashes and concurrent processes: atomic replacement, exclusive folders."""

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
    """Replace ``path`` by ``data``; after a crash at any moment it holds all of one of both.

    Its ``mode`` is masked by the process's umask, as of any file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _written_beside(path, data, mode) as temporary:
        temporary.replace(path)
    sync_folder(path.parent)


def create_atomically(path: Path, data: bytes) -> None:
    """Create ``path`` with ``data``, completely or not at all; of several processes one succeeds.

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
    try:
        handle, name = _open_temporary(path, mode)
    except OSError as error:  # name the file that was asked for
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    with os.fdopen(handle, "wb") as file:  # its lock is held until it is renamed
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if sys.platform == "win32":
                file.close()
            yield Path(name)
        finally:
            if sys.platform == "win32" or _is_at(Path(name), handle):
                Path(name).unlink(missing_ok=True)


def _open_temporary(path: Path, mode: int) -> tuple[int, str]:
    """An empty file beside ``path`` that no other process writes, and its name: one per path.

    So the file of a killed process is used again and nothing piles up.
    """
    if sys.platform == "win32":
        return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = path.with_name(f".{path.name}.tmp")
    while os.fstat(handle := _lock(temporary, mode)).st_nlink > 1:
        temporary.unlink()  # a writer was killed after linking to it
        os.close(handle)
    os.ftruncate(handle, 0)
    return handle, str(temporary)


if sys.platform != "win32":

    def _lock(path: Path, mode: int, flags: int = 0) -> int:
        """Open and lock a file, made if absent: that which has the name when it is locked."""
        while True:
            handle = os.open(
                path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, mode
            )
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | flags)
                if _is_at(path, handle):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)


def _is_at(path: Path, handle: int) -> bool:
    """Whether an open file still has this name: its holder may have renamed or removed it."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


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

    An absent folder is made; a file has its lock in a hidden ``lock_file`` beside it.
    The file of a lock goes with it (not on Windows).
    """
    lock_file = lock_file or path / ".lock"
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            if sys.platform == "win32":
                stack.enter_context(FileLock(lock_file, timeout=0))
            else:
                stack.callback(
                    os.close, handle := _lock(lock_file, 0o644, fcntl.LOCK_NB)
                )
        except (
            Timeout,
            BlockingIOError,
            FileNotFoundError,
        ):  # the last: its folder goes just now
            raise BusyError(f"another process is working on {path}") from None
        try:
            yield
        finally:
            # only its holder removes it, so that this cannot be somebody else's file
            if sys.platform != "win32" and _is_at(lock_file, handle):
                lock_file.unlink()
