"""Sessions on disk: every change is a file that only one process can create.

``ID/000...12.safetensors`` is version 12 of a session: complete, or a change after version 11
(:mod:`.changes`). One link is the moment at which a batch counts, so a server that is killed leaves
each session before or after a batch. A checksum and the session's id tell damaged, swapped files.

Replicas share a store without locks or leases: one that has read version 12 creates version 13,
which fails if there is one, and does not count if later ones are there (those before the last
complete one are removed). A deleted session is an empty version, for a day, for late replicas.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cliquetta.methods.base import Adapter
from cliquetta.methods.state import pack_state, unpack_state
from cliquetta.serve import changes
from cliquetta.serve.schema import SessionInfo
from cliquetta.serve.store_files import files_at

_SUFFIX = ".safetensors"
_RESPONSE = "response."
_PROGRESS = ("sequence", "images")
_TOMBSTONE_SECONDS = 86400
_LOOKS = 4
_log = logging.getLogger(__name__)


class FencedError(Exception):
    """Another replica has written the session since it was read; nothing of this one counts."""

    def __init__(self, ahead: int = 1) -> None:
        self.ahead = ahead  # versions that others have written since
        super().__init__("the session was written by another replica")


@dataclass(frozen=True)
class StoredResponse:
    """A response that was sent, and the request that it belongs to."""

    digest: str  # hash of the request
    packed: bytes  # the body, compressed
    key: str = ""  # the router's name for the request, the same when it is sent to another replica

    @classmethod
    def of(cls, digest: str, body: bytes, key: str = "") -> StoredResponse:
        """The response ``body`` to the request with ``digest``."""
        return cls(digest, zlib.compress(body, 1), key)

    @property
    def body(self) -> bytes:
        """The body as it was sent."""
        return zlib.decompress(self.packed)


@dataclass
class Resident:
    """The part of a session that is in memory only while it is in use."""

    adapter: Adapter
    responses: dict[int, StoredResponse] = field(default_factory=dict)  # by batch number
    version: int = 0
    chain: changes.Chain = field(default_factory=changes.Chain)

    @property
    def bytes(self) -> int:
        """Size of its memory and of the start values beside it, as it is on disk, and responses."""
        memory = self.adapter.memory
        sizes = [2 * memory[name].nbytes for name in memory]
        sizes += [value.nbytes for value in self.chain.memory.values()]
        return sum(sizes) + sum(len(response.packed) for response in self.responses.values())


@dataclass
class StoredSession:
    """A session without the memory of its method."""

    info: SessionInfo
    owner: str
    used: float  # time of the last change, in seconds since 1970
    imported: bool = False  # whether its memory came from a client and not from its own batches
    bytes: int = 0  # size of its files
    version: int = 0  # counts the changes


class Store:
    """Sessions in a folder, or at a URL of fsspec. Names of files come from ids that we made."""

    def __init__(self, where: Path | str) -> None:
        self.files = files_at(where)
        self.failing = False  # whether the last attempt to write failed

    @classmethod
    @contextmanager
    def open(cls, where: Path | str) -> Iterator[Store]:
        """The store of a service and its replicas; a folder is locked against other services."""
        store = cls(where)
        with store.files.opened():
            yield store

    def scan(self, known: Mapping[str, StoredSession] | None = None) -> list[StoredSession]:
        """All sessions, oldest first; those of ``known`` that have not changed are not read."""
        sessions = []
        for id, (version, size) in _latest(self.files.sizes()).items():
            stored = (known or {}).get(id)
            if size and (stored is None or stored.version != version):
                stored = self.find(id)
            if size and stored is not None:
                sessions.append(stored)
        return sorted(sessions, key=lambda stored: (stored.info.created, stored.info.id))

    def find(self, id: str) -> StoredSession | None:
        """A session as it is now; a file that cannot be read is reported and left alone."""
        while True:
            version, size = self.present(id)
            if size == 0:
                return None
            name = _name(id, version)
            try:
                stored = _parse_notes(changes.notes_of(self.files.head(name)), id)
                used = self.files.modified(name)
                return replace(stored, used=used, bytes=size, version=version)
            except (ValueError, KeyError, TypeError, OSError) as error:
                if self.present(id) == (version, size):  # else a later version has replaced it
                    _log.warning("the session file %s is not used: %s", name, error)
                    return None

    def save(self, session: StoredSession, resident: Resident) -> None:
        """Write a session as its next version, durably; only changes if the chain knows the rest.

        :class:`FencedError` if it is another version already; nothing was changed then.
        """
        responses, chain, version = resident.responses, resident.chain, session.version + 1
        made = session.info.model_dump()
        progress = {name: made.pop(name) for name in _PROGRESS}
        notes: dict[str, Any] = {
            "session": {**made, "owner": session.owner},
            "progress": {**progress, "imported": session.imported},
            "responses": {str(number): response.digest for number, response in responses.items()},
            "keys": {str(number): one.key for number, one in responses.items() if one.key},
            "checksum": changes.UNSEALED.decode(),
        }
        extra = {
            f"{_RESPONSE}{number}": torch.frombuffer(bytearray(one.packed), dtype=torch.uint8)
            for number, one in responses.items()
        }
        memory = resident.adapter.state_dict()
        rows = chain.changes(memory)
        if rows is None:
            data = _seal(pack_state(resident.adapter, extra=extra, notes=notes))
        else:
            notes |= {"base": chain.base, "after": chain.seal}
            data = _seal(changes.pack_changes(rows, extra, notes))
        try:
            self._write(session.info.id, data, version, version if rows is None else chain.base)
        except BaseException as error:
            self.failing = not isinstance(error, FencedError)
            raise
        self.failing = False
        chain.written(memory, rows, version, data)
        session.version = resident.version = version

    def load(self, adapter: Adapter, id: str, version: int) -> tuple[StoredSession, Resident]:
        """Let ``adapter`` continue where the session was at ``version``.

        :class:`FencedError` if it is another one already, :class:`DamagedError` for other files.
        """
        data = changes.fold(self._read(id, version))
        saved = unpack_state(adapter, data, source="the session's file")
        responses = {
            int(number): StoredResponse(
                digest,
                saved.extra[f"{_RESPONSE}{number}"].numpy().tobytes(),
                saved.notes["keys"].get(number, ""),
            )
            for number, digest in saved.notes["responses"].items()
        }
        return _parse_notes(saved.notes, id), Resident(adapter, responses, version)

    def delete(self, id: str, version: int = 0) -> None:
        """Write an empty version after ``version`` (0: any), or raise :class:`FencedError`."""
        while last := version or self.present(id)[0]:
            try:
                self._write(id, b"", last + 1, last + 1)
                return
            except FencedError:
                if version:
                    raise

    def collect(self) -> None:
        """Remove what is left of sessions that were deleted long ago."""
        for id, (version, size) in _latest(self.files.sizes()).items():
            name = _name(id, version)
            with suppress(OSError):
                if not size and time.time() - self.files.modified(name) > _TOMBSTONE_SECONDS:
                    self.files.remove(name)

    def present(self, id: str, least: int = 1) -> tuple[int, int]:
        """Last version of a session or its deletion, and the size of its files; zeros if none.

        A listing may miss a file and the one that replaces it meanwhile: what seems older than
        version ``least`` is looked at again. If it still is, files were removed.
        """
        if re.fullmatch(_ID, id) is None:  # it comes from a client, and would be part of a path
            return 0, 0
        version, size = 0, 0
        for _ in range(_LOOKS):
            version, size = _latest(self.files.sizes(id)).get(id, (0, 0))
            if version >= least:
                break
        return version, size

    def _write(self, id: str, data: bytes, version: int, base: int) -> None:
        """Create ``version``; those before ``base`` are not needed after it."""
        try:
            self.files.create(_name(id, version), data)
        except (FileExistsError, FileNotFoundError):
            raise FencedError from None
        names = self.files.sizes(id)
        last, _ = _latest(names).get(id, (0, 0))
        if last != version:  # followed already, or too late: written when later ones were there
            raise FencedError(last - version)
        for name in names:
            if _name(id, 0) < name < _name(id, base):
                self.files.remove(name)

    def _read(self, id: str, version: int) -> list[bytes]:
        """The complete file that a version is based on, and the changes after it."""
        try:
            last = _checked(self.files.read(_name(id, version)))
            first = changes.notes_of(last).get("base", version)
            before = [self.files.read(_name(id, number)) for number in range(first, version)]
            return [*map(_checked, before), last]
        except FileNotFoundError:
            if self.present(id)[0] == version:
                raise changes.DamagedError("a change of the session is gone") from None
            raise FencedError from None


_ID = "[0-9a-f]{32}"


def _name(id: str, version: int) -> str:
    """The file of a version; names sort by version."""
    return f"{id}/{version:016d}{_SUFFIX}"


def _latest(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Last version of every session among files, and the size of all; 0 if it is deleted."""
    versions: dict[str, dict[int, int]] = {}
    for name, size in sizes.items():
        if parts := re.fullmatch(rf"({_ID})/([0-9]+){_SUFFIX}", name):
            versions.setdefault(parts[1], {})[int(parts[2])] = size
    return {id: (max(of), sum(of.values()) if of[max(of)] else 0) for id, of in versions.items()}


def _parse_notes(notes: Mapping[str, Any], id: str) -> StoredSession:
    """The session of a file with these notes, which must be the one it is named after."""
    made, progress = dict(notes["session"]), dict(notes["progress"])
    owner, imported = made.pop("owner"), progress.pop("imported")
    info = SessionInfo(**made, **progress)
    if info.id != id:
        message = f"the file of session {id} holds session {info.id}: copied or swapped"
        raise changes.DamagedError(message)
    return StoredSession(info, owner, time.time(), imported)


def _seal(data: bytes) -> bytes:
    """Put the hash of all bytes into the field that was left for it."""
    digest = hashlib.sha256(data).hexdigest().encode()
    return changes.SEAL.sub(lambda match: match[1] + digest + b'\\"', data, count=1)


def _checked(data: bytes) -> bytes:
    """Return the bytes unchanged if they are those that were sealed."""
    seal = changes.seal_of(data).encode()
    if hashlib.sha256(data.replace(seal, changes.UNSEALED, 1)).hexdigest().encode() != seal:
        raise changes.DamagedError("the session's file is damaged: its checksum differs")
    return data
