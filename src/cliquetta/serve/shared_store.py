"""Sessions that several replicas share: every change is a file that only one of them can create.

``ID/000…12.safetensors`` is version 12 of a session, whole or as a change after version 11. A
replica that has read version 12 writes its change by creating version 13, which fails if there is
one: of two replicas, one succeeds, and the other reads again. No replica holds a lock or a lease,
so it does not matter whether one that does not answer is dead, slow or cut off; when it comes back,
its version exists already, or (those before the last whole one are removed) later ones do, and what
it wrote does not count. A deleted session is an empty version, which is kept for a day so that a
late replica finds it.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from cliquetta.atomic import create_atomically, sync_folder
from cliquetta.data.remote import is_url
from cliquetta.errors import BusyError, UserError
from cliquetta.serve.changes import DamagedError
from cliquetta.serve.store import (
    UNREADABLE,
    FencedError,
    Store,
    StoredSession,
    is_id,
    join_into,
    parse_notes,
    read_chain,
    read_notes,
    version_name,
)

_log = logging.getLogger(__name__)
_SUFFIX = ".safetensors"
_TOMBSTONE_SECONDS = 86400
BUCKETS = ("s3", "s3a", "gs", "gcs", "memory")
"""Protocols of fsspec that can create an object only if there is none, in one step."""


class _Files(Protocol):
    """Where versions are kept, by names with ``/``."""

    def create(self, name: str, data: bytes) -> None:
        """Write a file durably, or raise ``FileExistsError``."""

    def read(self, name: str) -> bytes:
        """A file, or ``FileNotFoundError``."""

    def notes(self, name: str) -> dict[str, Any]:
        """The notes in the header of a session's file."""

    def sizes(self, under: str = "") -> dict[str, int]:
        """All files below a folder, which need not exist, with their sizes."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    def modified(self, name: str) -> float:
        """When a file was written, in seconds since 1970."""

    def free_bytes(self) -> float:
        """Room that is left."""


class SharedStore(Store):
    """A folder, or a URL of fsspec, that the replicas of one service share."""

    def __init__(self, where: Path | str) -> None:
        local = not is_url(str(where))
        super().__init__(Path(where))
        self._files: _Files = _Folder(Path(where)) if local else _Bucket(str(where))
        self._local = local

    @classmethod
    @contextmanager
    def open(cls, folder: Path | str) -> Iterator[SharedStore]:
        """The store for a service and all of its replicas; a folder is locked against others."""
        if is_url(str(folder)):
            store = cls(folder)
            store._check_exclusive()
            yield store
            return
        with super().open(folder) as opened:
            assert isinstance(opened, SharedStore)
            yield opened

    @staticmethod
    def _adopt(folder: Path) -> None:
        """Take over the sessions of a server without replicas: one file each, without changes.

        Versions count on from the time: a replica of an earlier service has none of them.
        """
        for path in [path for path in folder.glob(f"*{_SUFFIX}") if is_id(path.stem)]:
            with suppress(*UNREADABLE):  # damage is told when the session is used
                join_into(path, Store(folder)._read(path.stem, 0))
            versions = folder / path.stem
            shutil.rmtree(versions, ignore_errors=True)
            versions.mkdir()
            path.replace(folder / _name(path.stem, int(time.time())))
            sync_folder(versions)
        sync_folder(folder)

    def _check_exclusive(self) -> None:
        """Refuse a store that would replace what another replica wrote."""
        name = f".probe-{time.time_ns()}"
        self._files.create(name, b"1")
        try:
            self._files.create(name, b"2")
        except FileExistsError:
            return
        finally:
            self._files.remove(name)
        raise UserError(f"{self._files} cannot create a file only if there is none: use another")

    def scan(self, known: Mapping[str, StoredSession] | None = None) -> list[StoredSession]:
        """All sessions, oldest first; those of ``known`` that have not changed are not read."""
        found = []
        for id, (version, size) in _latest(self._files.sizes()).items():
            if size == 0:
                continue
            stored = (known or {}).get(id)
            if stored is None or stored.version != version:
                stored = self.find(id)
            if stored is not None:
                found.append(stored)
        return sorted(found, key=StoredSession.age)

    def version(self, id: str) -> int:
        """The present version of a session; 0 if there is none."""
        version, size = self._present(id)
        return version if size else 0

    def find(self, id: str) -> StoredSession | None:
        """A session as it is now."""
        while True:
            version, size = self._present(id)
            if size == 0:
                return None
            try:
                stored = parse_notes(self._files.notes(_name(id, version)), id)
                stored.version, stored.bytes = version, size
                return stored
            except UNREADABLE as error:
                if self._present(id) == (version, size):  # else a later version has replaced it
                    _log.warning("the session file %s is not used: %s", _name(id, version), error)
                    return None

    def free_bytes(self) -> int:
        """Free space, as far as the store can tell."""
        return int(min(self._files.free_bytes(), 2**62))

    def delete(self, id: str, version: int = 0) -> None:
        """Write an empty version after ``version``, or after the present one if that is 0."""
        version = version or self.version(id)
        if version:
            self._write(id, b"", version, version + 1)
        if self._local:
            (self._folder / f"{id}.delete").unlink(missing_ok=True)

    def deletions(self) -> list[str]:
        """Ids that another process asked to delete."""
        return super().deletions() if self._local else []

    def collect(self) -> None:
        """Remove what is left of sessions that were deleted long ago."""
        for id, (version, size) in _latest(self._files.sizes()).items():
            name = _name(id, version)
            with suppress(OSError):
                if not size and time.time() - self._files.modified(name) > _TOMBSTONE_SECONDS:
                    self._files.remove(name)

    def _present(self, id: str) -> tuple[int, int]:
        """Last version of a session and the size of its files; zeros if there is none."""
        if not is_id(id):  # it comes from a client, and would be part of a path
            return 0, 0
        return _latest(self._files.sizes(id)).get(id, (0, 0))

    def _write(self, id: str, data: bytes, version: int, whole: int) -> None:
        mine = version + 1
        if version == 0 and self._local:
            (self._folder / id).mkdir(exist_ok=True)
            sync_folder(self._folder)
        try:
            self._files.create(_name(id, mine), data)
        except (FileExistsError, FileNotFoundError):
            raise FencedError from None
        names = self._files.sizes(id)
        last, _ = _latest(names).get(id, (0, 0))
        if last != mine:  # followed already, or too late: written when later ones were there
            raise FencedError(last - mine)
        for name in names:
            if _name(id, 0) < name < _name(id, whole):
                self._files.remove(name)

    def _read(self, id: str, version: int) -> list[bytes]:
        try:
            return read_chain(lambda number: self._files.read(_name(id, number)), version)
        except FileNotFoundError:
            if self._present(id)[0] == version:
                raise DamagedError("a change of the session is gone") from None
            raise FencedError from None


def delete_sessions(where: str, ids: Sequence[str]) -> bool:
    """Delete sessions of a store; ``False`` if its server was asked to, as one is running."""
    if is_url(where):
        store = SharedStore(where)
        for id in ids:
            store.delete(id)
        return True
    try:
        with Store.open(where) as folder:
            for id in ids:
                folder.delete(id)
            return True
    except BusyError:
        for id in ids:
            Store(Path(where)).request_deletion(id)
        return False


def _name(id: str, version: int) -> str:
    return f"{id}/{version_name(version)}"


def _latest(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Last version of every session among files, and the size of all; 0 if it is deleted."""
    found: dict[str, dict[int, int]] = {}
    for name, size in sizes.items():
        id, _, version = name.removesuffix(_SUFFIX).partition("/")
        if is_id(id) and version.isdecimal():
            found.setdefault(id, {})[int(version)] = size
    return {id: (max(of), sum(of.values()) if of[max(of)] else 0) for id, of in found.items()}


class _Folder:
    """A local or mounted folder; it must know hard links, and show what others wrote at once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, name: str, data: bytes) -> None:
        create_atomically(self._root / name, data)

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def notes(self, name: str) -> dict[str, Any]:
        return read_notes(self._root / name)

    def sizes(self, under: str = "") -> dict[str, int]:
        found = {}
        for path in (self._root / under).glob("*" if under else "*/*"):
            with suppress(FileNotFoundError):  # removed while we look
                found[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return found

    def remove(self, name: str) -> None:
        path = self._root / name
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            path.parent.rmdir()

    def modified(self, name: str) -> float:
        return (self._root / name).stat().st_mtime

    def free_bytes(self) -> float:
        return shutil.disk_usage(self._root).free


class _Bucket:
    """An object store through fsspec; a written object is durable."""

    def __init__(self, url: str) -> None:
        protocol = urlsplit(url).scheme
        if protocol not in BUCKETS:
            raise UserError(
                f"sessions cannot be shared through {protocol}://: use a mounted folder, s3:// or "
                "gs://, where a replica cannot overwrite what another has written"
            )
        try:
            from fsspec.core import url_to_fs

            how = {} if protocol == "memory" else {"use_listings_cache": False}
            self._fs, self._root = url_to_fs(url, **how)
        except ImportError as error:
            raise UserError(f"{protocol}:// needs another package: {error}") from error
        self._root = self._root.rstrip("/")

    def create(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"{self._root}/{name}", data, mode="create")

    def read(self, name: str) -> bytes:
        data: bytes = self._fs.cat_file(f"{self._root}/{name}")
        return data

    def notes(self, name: str) -> dict[str, Any]:
        path = f"{self._root}/{name}"
        size = int.from_bytes(self._fs.cat_file(path, start=0, end=8), "little")
        head = json.loads(self._fs.cat_file(path, start=8, end=8 + size))
        notes: dict[str, Any] = json.loads(head["__metadata__"]["notes"])
        return notes

    def sizes(self, under: str = "") -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(f"{self._root}/{under}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        root = len(self._root) + 1
        return {path[root:]: int(entry["size"]) for path, entry in found.items()}

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def modified(self, name: str) -> float:
        moment: float = self._fs.modified(f"{self._root}/{name}").timestamp()
        return moment

    def free_bytes(self) -> float:
        return math.inf

    def __str__(self) -> str:
        return f"{self._fs.protocol} at {self._root}"
