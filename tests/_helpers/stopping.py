"""Processes that end at a chosen file operation, as if they had been killed there."""

import faulthandler
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

KILLED = 137
_SECONDS = 120  # after which a fork that hangs says where, and is ended with SIGALRM
_OPERATIONS = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.truncate",
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def in_fork(
    action: Callable[[], object],
    folder: Path,
    stop_at: int | None = None,
    name: str = "",
) -> int:
    """Run in a fork that ends before its ``stop_at``-th operation, from 0, on files in ``folder``.

    Only files with ``name`` in their path count.

    Operations are those that Python reports to audit hooks (opening for writing,
    renaming, removing, linking, making folders) and ``os.fsync``, which does nothing
    here: a process is lost, not a machine. Nothing is flushed or cleaned up.

    Returns:
        Its exit status: 0, ``KILLED`` where it was stopped, 1 after an error, which is
        printed, or that of SIGALRM if it hangs.

    """
    _wait_for_threads()
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(_SECONDS)
        faulthandler.dump_traceback_later(_SECONDS - 5)
        try:
            _stop_at(stop_at, str(folder), name)
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# threads of this process while nothing runs: pools of libraries, and this one
_steady = 0


def _wait_for_threads() -> None:
    """Wait until no thread is on its way out.

    One that was joined still clears up below Python, and a fork has the locks that it
    holds then.
    """
    global _steady
    tasks = Path("/proc/self/task")
    end = time.monotonic() + 0.5
    while len(list(tasks.iterdir())) > _steady and time.monotonic() < end:
        time.sleep(0.001)
    _steady = len(list(tasks.iterdir()))


def _stop_at(number: int | None, folder: str, part: str) -> None:
    count = itertools.count()

    def operate(path: object) -> None:
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        # names without a folder are relative to an open one, as shutil.rmtree gives
        # them
        ours = name.startswith(folder) or (name and os.sep not in name)
        if ours and part in name and next(count) == number:
            os._exit(KILLED)

    def hear(event: str, words: tuple[object, ...]) -> None:
        opened = event == "open" and isinstance(words[2], int) and words[2] & _WRITING
        if event in _OPERATIONS or opened:
            operate(words[0])

    def fsync(handle: int) -> None:
        operate(Path(f"/proc/self/fd/{handle}").readlink())

    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(hear)


def tree(folder: Path) -> dict[str, bytes | None]:
    """All files below ``folder`` with their bytes, and its folders."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }
