"""Processes that end at a chosen file operation of SQLite, as if they had been killed there.

SQLite lets programs replace the functions by which it calls the operating system. Ours
count those that change files, and end the process before the one that was chosen.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

from tests._helpers.stopping import KILLED

_SIZE = ctypes.c_size_t
_OFFSET = ctypes.c_int64
_NAMED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
_CHANGING: dict[str, Any] = {
    "open": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "ftruncate": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _OFFSET),
    "write": ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, _SIZE),
    "pwrite": ctypes.CFUNCTYPE(
        ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, _SIZE, _OFFSET
    ),
    "pwrite64": ctypes.CFUNCTYPE(
        ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, _SIZE, _OFFSET
    ),
    "unlink": _NAMED,
    "close": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int),
}
"""Names of SQLite's system calls, and their types."""


class _FileSystem(ctypes.Structure):
    """The beginning of ``sqlite3_vfs``; only the last two members are called here."""

    _fields_ = (
        ("iVersion", ctypes.c_int),
        ("szOsFile", ctypes.c_int),
        ("mxPathname", ctypes.c_int),
        ("pNext", ctypes.c_void_p),
        ("zName", ctypes.c_char_p),
        ("pAppData", ctypes.c_void_p),
        *((f"method{number}", ctypes.c_void_p) for number in range(12)),
        ("xCurrentTimeInt64", ctypes.c_void_p),
        (
            "xSetSystemCall",
            ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
            ),
        ),
        (
            "xGetSystemCall",
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p),
        ),
    )


def _file_system() -> Any:
    """SQLite's file system in this process; ``None`` where it cannot be reached."""
    import _sqlite3

    try:
        library = ctypes.CDLL(_sqlite3.__file__)
        library.sqlite3_vfs_find.restype = ctypes.POINTER(_FileSystem)
        found = library.sqlite3_vfs_find(None)
    except AttributeError:  # linked into Python, without its names
        return None
    return found if found and found.contents.iVersion >= 3 else None


def can_stop() -> bool:
    """Whether this Python's SQLite can be stopped."""
    return _file_system() is not None


_replaced: list[Any] = []  # functions that SQLite calls must not be collected


def stop_sqlite_at(number: int | None, *, torn: bool = False) -> Callable[[], int]:
    """End this process before SQLite's ``number``-th operation that changes a file, from 0.

    Args:
        number: The operation; ``None`` only counts.
        torn: Count writes only, and write the first half of the chosen one.

    Returns:
        A function that returns how many there were.

    """
    system = _file_system()
    count = 0

    def is_chosen() -> bool:
        nonlocal count
        count += 1
        return count - 1 == number

    def replace(name: str, kind: Any) -> None:
        address = system.contents.xGetSystemCall(system, name.encode())
        if not address or (torn and "write" not in name):
            return
        real = kind(address)

        def call(*given: Any) -> int:
            if is_chosen():
                if torn:
                    place, data, size, *offset = given
                    real(place, data, size // 2, *offset)
                os._exit(KILLED)
            return int(real(*given))

        replacement = kind(call)
        _replaced.append(replacement)
        code = ctypes.cast(replacement, ctypes.c_void_p)
        assert system.contents.xSetSystemCall(system, name.encode(), code) == 0

    for name, kind in _CHANGING.items():
        replace(name, kind)
    return lambda: count
