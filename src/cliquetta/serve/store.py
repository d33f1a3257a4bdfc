"""Sessions on disk: every change is a file that only one process can create.

``ID/000...12.safetensors`` is version 12 of a session: how it was made, what its method remembers,
how many batches it has answered and the last responses themselves. It is whole, or (where a batch
changes little of a large memory, :mod:`.changes`) a change after version 11. One link is the moment
at which a batch counts: a server that is killed at any time finds each session before or after a
batch, never between. A checksum over all bytes of a file and the session's own id tell damaged and
swapped files.

Several replicas may share a store. One that has read version 12 writes its change by creating
version 13, which fails if there is one: of two replicas, one succeeds, and the other reads again.
No replica holds a lock or a lease, so it does not matter whether one that does not answer is dead,
slow or cut off; when it comes back, its version exists already, or (those before the last whole one
are removed) later ones do, and what it wrote does not count. A deleted session is an empty version,
which is kept for a day so that a late replica finds it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cliquetta.methods.base import Adapter
from cliquetta.methods.state import pack_state, unpack_state
from cliquetta.serve.changes import (
    SEAL,
    UNSEALED,
    Chain,
    DamagedError,
    fold,
    notes_of,
    pack_changes,
    seal_of,
)
from cliquetta.serve.store_files import files_at

_SUFFIX = ".safetensors"
_ANSWER = "answer."
_TOMBSTONE_SECONDS = 86400
_LOOKS = 4
_UNREADABLE = (ValueError, KeyError, TypeError, OSError)
"""What reading the head of a file that is none of ours may raise."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionSpec:
    """The specification of a session; only its classes and templates ever change."""

    id: str
    owner: str
    created: str
    model: str
    """The server's name for the model, not where it comes from."""
    method: str
    preset: str | None
    config: Mapping[str, Any]
    """The method's config in full, as JSON types."""
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    seed: int
    reject: float | None = None
    """How many images of none of the classes to look for."""
    calibrate: bool = False
    """Whether probabilities are scaled."""


@dataclass(frozen=True)
class Progress:
    """Progress of a session."""

    sequence: int = 0
    """Number of the last batch that was answered."""
    images: int = 0
    """Images predicted so far."""
    imported: bool = False
    """Whether its memory came from a client and not from its own batches."""


class FencedError(Exception):
    """Another replica has written the session since it was read; nothing of this one counts."""

    def __init__(self, ahead: int = 1) -> None:
        self.ahead = ahead
        """Versions that others have written since."""
        super().__init__("the session was written by another replica")


@dataclass(frozen=True)
class StoredResponse:
    """A response that was sent, and the request that it answers."""

    digest: str
    """Hash of the request."""
    packed: bytes
    """The body, compressed."""
    key: str = ""
    """The router's name for the request, the same when it is sent to another replica."""

    @classmethod
    def of(cls, digest: str, body: bytes, key: str = "") -> StoredResponse:
        """The response ``body`` to the request with ``digest``."""
        return cls(digest, zlib.compress(body, 1), key)

    @property
    def body(self) -> bytes:
        """The body as it was sent."""
        return zlib.decompress(self.packed)


@dataclass
class StoredSession:
    """A session without the memory of its method: how it was made, how far it has come."""

    spec: SessionSpec
    progress: Progress
    used: float
    """Time of the last change, in seconds since 1970."""
    bytes: int = 0
    """Size of its files."""
    version: int = 0
    """Counts the changes."""

    def age(self) -> tuple[str, str]:
        """Sorts sessions, oldest first."""
        return self.spec.created, self.spec.id


class Store:
    """Sessions in a folder, or at a URL of fsspec. Names of files come from ids that we made."""

    def __init__(self, where: Path | str) -> None:
        self.files = files_at(where)
        self.failing = False
        """Whether the last attempt to write failed."""

    @classmethod
    @contextmanager
    def open(cls, where: Path | str) -> Iterator[Store]:
        """The store of a service and its replicas; a folder is locked against other services."""
        store = cls(where)
        with store.files.opened():
            yield store

    def scan(self, known: Mapping[str, StoredSession] | None = None) -> list[StoredSession]:
        """All sessions, oldest first; those of ``known`` that have not changed are not read."""
        found = []
        for id, (version, size) in _latest(self.files.sizes()).items():
            stored = (known or {}).get(id)
            if size and (stored is None or stored.version != version):
                stored = self.find(id)
            if size and stored is not None:
                found.append(stored)
        return sorted(found, key=StoredSession.age)

    def version(self, id: str, known: int = 0) -> int:
        """The present version of a session, also if that is its deletion; 0 if there is none.

        It is less than one that is ``known`` only if files were removed by somebody else.
        """
        return self._present(id, max(1, known))[0]

    def find(self, id: str) -> StoredSession | None:
        """A session as it is now; a file that cannot be read is reported and left alone."""
        while True:
            version, size = self._present(id)
            if size == 0:
                return None
            name = _name(id, version)
            try:
                stored = _parse_notes(notes_of(self.files.head(name)), id)
                stored.version, stored.bytes = version, size
                stored.used = self.files.modified(name)
                return stored
            except _UNREADABLE as error:
                if self._present(id) == (version, size):  # else a later version has replaced it
                    _log.warning("the session file %s is not used: %s", name, error)
                    return None

    def save(
        self,
        adapter: Adapter,
        spec: SessionSpec,
        progress: Progress,
        answers: Mapping[int, StoredResponse],
        version: int = 0,
        chain: Chain | None = None,
    ) -> int:
        """Write a session that was read as ``version``; it is on disk when this returns.

        Only what changed of its memory is written if ``chain`` knows what is there; it is brought
        up to date.

        Returns:
            The version that it is now.

        Raises:
            FencedError: It is another version already; nothing was changed.

        """
        notes: dict[str, Any] = {
            "session": asdict(spec),
            "progress": asdict(progress),
            "answers": {str(number): answer.digest for number, answer in answers.items()},
            "keys": {str(number): answer.key for number, answer in answers.items() if answer.key},
            "checksum": UNSEALED.decode(),
        }
        extra = {f"{_ANSWER}{number}": _tensor(a.packed) for number, a in answers.items()}
        chain, memory = chain or Chain(), adapter.state_dict()
        changes = chain.changes(memory)
        if changes is None:
            data, whole = _seal(pack_state(adapter, extra=extra, notes=notes)), version + 1
        else:
            notes |= {"whole": chain.whole, "after": chain.seal}
            data, whole = _seal(pack_changes(changes, extra, notes)), chain.whole
        try:
            self._write(spec.id, data, version, whole)
        except BaseException as error:
            self.failing = not isinstance(error, FencedError)
            raise
        self.failing = False
        if changes is None:
            chain.begin(memory, whole, data)
        else:
            chain.follow(changes, data)
        return version + 1

    def load(
        self, adapter: Adapter, id: str, version: int
    ) -> tuple[StoredSession, dict[int, StoredResponse]]:
        """Let ``adapter`` continue where the session was, and return where that was.

        Raises:
            FencedError: It is another version than ``version`` already.
            DamagedError: Its files are not those that were written.

        """
        saved = unpack_state(adapter, fold(self._read(id, version)), source="the session's file")
        answers = {
            int(number): StoredResponse(
                digest,
                saved.extra[f"{_ANSWER}{number}"].numpy().tobytes(),
                saved.notes["keys"].get(number, ""),
            )
            for number, digest in saved.notes["answers"].items()
        }
        stored = _parse_notes(saved.notes, id)
        stored.version = version
        return stored, answers

    def delete(self, id: str, version: int = 0) -> None:
        """Write an empty version after ``version``, or after whatever is present if that is 0.

        Raises:
            FencedError: It is another version than ``version`` already.

        """
        while last := version or self._present(id)[0]:
            try:
                self._write(id, b"", last, last + 1)
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

    def _present(self, id: str, least: int = 1) -> tuple[int, int]:
        """Last version of a session and the size of its files; zeros if there is none.

        A listing may miss a file and the one that replaces it meanwhile: what seems older than
        version ``least`` is looked at again.
        """
        if re.fullmatch(_ID, id) is None:  # it comes from a client, and would be part of a path
            return 0, 0
        found = 0, 0
        for _ in range(_LOOKS):
            found = _latest(self.files.sizes(id)).get(id, (0, 0))
            if found[0] >= least:
                break
        return found

    def _write(self, id: str, data: bytes, version: int, whole: int) -> None:
        """Create the version after ``version``; those before ``whole`` are not needed after it."""
        mine = version + 1
        try:
            self.files.create(_name(id, mine), data)
        except (FileExistsError, FileNotFoundError):
            raise FencedError from None
        names = self.files.sizes(id)
        last, _ = _latest(names).get(id, (0, 0))
        if last != mine:  # followed already, or too late: written when later ones were there
            raise FencedError(last - mine)
        for name in names:
            if _name(id, 0) < name < _name(id, whole):
                self.files.remove(name)

    def _read(self, id: str, version: int) -> list[bytes]:
        """The whole file that a version is based on, and the changes after it."""
        try:
            last = _checked(self.files.read(_name(id, version)))
            first = notes_of(last).get("whole", version)
            before = [self.files.read(_name(id, number)) for number in range(first, version)]
            return [*map(_checked, before), last]
        except FileNotFoundError:
            if self._present(id)[0] == version:
                raise DamagedError("a change of the session is gone") from None
            raise FencedError from None


_ID = "[0-9a-f]{32}"


def _name(id: str, version: int) -> str:
    """The file of a version; names sort by version."""
    return f"{id}/{version:016d}{_SUFFIX}"


def _latest(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Last version of every session among files, and the size of all; 0 if it is deleted."""
    found: dict[str, dict[int, int]] = {}
    for name, size in sizes.items():
        if parts := re.fullmatch(rf"({_ID})/([0-9]+){_SUFFIX}", name):
            found.setdefault(parts[1], {})[int(parts[2])] = size
    return {id: (max(of), sum(of.values()) if of[max(of)] else 0) for id, of in found.items()}


def _parse_notes(notes: Mapping[str, Any], id: str) -> StoredSession:
    """The session of a file with these notes, which must be the one it is named after."""
    values = dict(notes["session"])
    for name in ("classes", "templates"):
        values[name] = tuple(values[name])
    spec = SessionSpec(**values)
    if spec.id != id:
        raise DamagedError(f"the file of session {id} holds session {spec.id}: copied or swapped")
    return StoredSession(spec, Progress(**notes["progress"]), time.time())


def _seal(data: bytes) -> bytes:
    """Put the hash of all bytes into the field that was left for it."""
    digest = hashlib.sha256(data).hexdigest().encode()
    return SEAL.sub(lambda found: found[1] + digest + b'\\"', data, count=1)


def _checked(data: bytes) -> bytes:
    """Return the bytes unchanged if they are those that were sealed."""
    seal = seal_of(data).encode()
    if hashlib.sha256(data.replace(seal, UNSEALED, 1)).hexdigest().encode() != seal:
        raise DamagedError("the session's file is damaged: its checksum differs")
    return data


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
