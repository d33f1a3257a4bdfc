"""Sessions on disk: one safetensors file each, replaced as a whole after every change.

A file holds everything: how the session was made, what its method remembers, how many batches it
has answered and the last answers themselves. So one rename is the moment at which a batch counts,
and a server that is killed at any time finds each session before or after a batch, never between.
A checksum over all of its bytes and the session's own id tell damaged and swapped files.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cliquetta.atomic import exclusive, sync_folder, write_atomically
from cliquetta.errors import UserError
from cliquetta.methods._shared.state import pack_state, read_header, unpack_state
from cliquetta.methods.base import Adapter

_SUFFIX = ".safetensors"
_DELETE = ".delete"
_ANSWER = "answer."
_UNSEALED = "0" * 64
UNREADABLE = (ValueError, KeyError, TypeError, OSError)
"""What reading the head of a file that is none of ours may raise."""
# The field as it stands in a file: JSON inside the JSON of a safetensors header. Texts of clients
# are escaped once more, so that none of them can look like it.
_SEAL = re.compile(rb'(\\"checksum\\": \\")([0-9a-f]{64})\\"')

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionSpec:
    """How a session was made; nothing of it ever changes but classes and templates."""

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


class DamagedError(UserError):
    """A session file that is not what the server wrote."""


@dataclass(frozen=True)
class Progress:
    """How far a session has come."""

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
class Answer:
    """An answer that was given, with what it answered."""

    digest: str
    """Hash of the request."""
    packed: bytes
    """The body, compressed."""
    key: str = ""
    """The router's name for the request, the same when it is sent to another replica."""

    @classmethod
    def of(cls, digest: str, body: bytes, key: str = "") -> Answer:
        """Keep ``body`` as the answer to the request with ``digest``."""
        return cls(digest, zlib.compress(body, 1), key)

    @property
    def body(self) -> bytes:
        """The answer as it was sent."""
        return zlib.decompress(self.packed)


@dataclass
class StoredSession:
    """A session without the memory of its method: how it was made, how far it has come."""

    spec: SessionSpec
    progress: Progress
    used: float
    """Time of the last change, in seconds since 1970."""
    bytes: int = 0
    """Size of its file."""
    version: int = 0
    """Counts the changes where several replicas share a store."""

    def age(self) -> tuple[str, str]:
        """Sorts sessions, oldest first."""
        return self.spec.created, self.spec.id


class Store:
    """A folder of sessions. File names come from ids that the server made, never from clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.failing = False
        """Whether the last attempt to write failed."""

    @classmethod
    @contextmanager
    def open(cls, folder: Path | str) -> Iterator[Store]:
        """The store in ``folder``, made if absent and locked against other servers."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)  # class names and answers are the clients' own
        with exclusive(path):
            for left in path.glob(f".*{_SUFFIX}.*.tmp"):  # of a server that was killed
                left.unlink()
            cls._adopt(path)
            yield cls(path)

    @staticmethod
    def _adopt(folder: Path) -> None:
        """Take over what replicas left: folders of versions (see shared_store.py)."""
        for versions in [path for path in folder.iterdir() if is_id(path.name) and path.is_dir()]:
            target = folder / f"{versions.name}{_SUFFIX}"
            latest = max(versions.glob(f"*{_SUFFIX}"), default=None)
            if latest is not None and latest.stat().st_size and not target.exists():
                latest.replace(target)
                sync_folder(folder)
            shutil.rmtree(versions)

    def scan(self) -> list[StoredSession]:
        """All sessions, oldest first; unreadable files are reported and left alone."""
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                session = parse_notes(read_header(path)["notes"], path.name.removesuffix(_SUFFIX))
                status = path.stat()
                session.used, session.bytes = status.st_mtime, status.st_size
                found.append(session)
            except UNREADABLE as error:
                _log.warning("the session file %s is not used: %s", path, error)
        return sorted(found, key=StoredSession.age)

    def free_bytes(self) -> int:
        """Free space on the disk of the sessions."""
        return shutil.disk_usage(self._folder).free

    def save(
        self,
        adapter: Adapter,
        spec: SessionSpec,
        progress: Progress,
        answers: Mapping[int, Answer],
        version: int = 0,
    ) -> int:
        """Write a session that was read as ``version``; it is on disk when this returns.

        Returns:
            The version that it is now.

        Raises:
            FencedError: It is another version already; nothing was changed.

        """
        notes = {
            "session": asdict(spec),
            "progress": asdict(progress),
            "answers": {str(number): answer.digest for number, answer in answers.items()},
            "keys": {str(number): answer.key for number, answer in answers.items() if answer.key},
            "saved": time.time(),
            "checksum": _UNSEALED,
        }
        extra = {f"{_ANSWER}{number}": _tensor(a.packed) for number, a in answers.items()}
        data = _seal(pack_state(adapter, extra=extra, notes=notes))
        try:
            written = self._write(spec.id, data, version)
        except BaseException as error:
            self.failing = not isinstance(error, FencedError)
            raise
        self.failing = False
        return written

    def load(
        self, adapter: Adapter, id: str, version: int = 0
    ) -> tuple[Progress, dict[int, Answer]]:
        """Let ``adapter`` continue where the session was, and return where that was."""
        data = self._read(id, version)
        _check_seal(data)
        saved = unpack_state(adapter, data, source="the session's file")
        keys = saved.notes.get("keys", {})
        answers = {
            int(number): Answer(
                digest, saved.extra[f"{_ANSWER}{number}"].numpy().tobytes(), keys.get(number, "")
            )
            for number, digest in saved.notes["answers"].items()
        }
        return parse_notes(saved.notes, id).progress, answers

    def _write(self, id: str, data: bytes, version: int) -> int:
        write_atomically(self._path(id), data)
        return version

    def _read(self, id: str, version: int) -> bytes:
        del version
        try:
            return self._path(id).read_bytes()
        except FileNotFoundError:
            raise DamagedError("the session's file is gone") from None

    def delete(self, id: str, version: int = 0) -> None:
        """Remove a session that was read as ``version``."""
        del version
        for path in (self._path(id), self._folder / f"{id}{_DELETE}"):
            path.unlink(missing_ok=True)
        sync_folder(self._folder)

    def request_deletion(self, id: str) -> None:
        """Ask the server that works on this folder to delete a session."""
        (self._folder / f"{id}{_DELETE}").touch()

    def deletions(self) -> list[str]:
        """Ids that another process asked to delete."""
        return [path.name.removesuffix(_DELETE) for path in self._folder.glob(f"*{_DELETE}")]

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}{_SUFFIX}"


def is_id(name: str) -> bool:
    """Whether ``name`` can be the id of a session, and so a part of a path."""
    return re.fullmatch("[0-9a-f]{32}", name) is not None


def parse_notes(notes: Mapping[str, Any], id: str) -> StoredSession:
    """What a file's notes say about its session, which must be the one it is named after."""
    values = dict(notes["session"])
    for name in ("classes", "templates"):
        values[name] = tuple(values[name])
    spec = SessionSpec(**values)
    if spec.id != id:
        raise DamagedError(f"the file of session {id} holds session {spec.id}: copied or swapped")
    return StoredSession(spec, Progress(**notes["progress"]), notes.get("saved", time.time()))


def _seal(data: bytes) -> bytes:
    """Put the hash of all bytes into the field that was left for it."""
    digest = hashlib.sha256(data).hexdigest().encode()
    return _SEAL.sub(lambda found: found[1] + digest + b'\\"', data, count=1)


def _check_seal(data: bytes) -> None:
    """Refuse bytes other than those that were sealed; files of version 0.1 have no seal."""
    head = data[: 8 + int.from_bytes(data[:8], "little")]
    found = _SEAL.search(head)
    if found is None:
        return
    first, last = found.span(2)
    digest = hashlib.sha256(data[:first] + _UNSEALED.encode() + data[last:]).hexdigest()
    if digest.encode() != found[2]:
        raise DamagedError("the session's file is damaged: its checksum differs")


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
