"""Sessions on disk: one safetensors file each, and for large ones the changes since it was written.

A file holds everything: how the session was made, what its method remembers, how many batches it
has answered and the last answers themselves. ``ID.safetensors`` is replaced as a whole; where a
batch changes little of a large memory (:mod:`.changes`), ``ID.changes/VERSION.safetensors`` is
added instead. Either way one rename is the moment at which a batch counts, and a server that is
killed at any time finds each session before or after a batch, never between. A checksum over all
bytes of a file and the session's own id tell damaged and swapped files.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cliquetta.atomic import exclusive, sync_folder, write_atomically
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
from cliquetta.tensor_file import read_header

_SUFFIX = ".safetensors"
_DELETE = ".delete"
_CHANGES = ".changes"
_ANSWER = "answer."
UNREADABLE = (ValueError, KeyError, TypeError, OSError)
"""What reading the head of a file that is none of ours may raise."""
_log = logging.getLogger(__name__)

_PRIVATE = 0o600
"""Mode of files of sessions: what clients sent is nobody else's."""


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
    reject: float | None = None
    """How many images of none of the classes to look for."""
    calibrate: bool = False
    """Whether probabilities are scaled."""


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
    """Size of its files."""
    version: int = 0
    """Counts the changes."""

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
            _clean(path)
            cls._adopt(path)
            yield cls(path)

    @staticmethod
    def _adopt(folder: Path) -> None:
        """Take over what replicas left: folders of versions (see shared_store.py)."""
        for versions in [path for path in folder.iterdir() if is_id(path.name) and path.is_dir()]:
            target = folder / f"{versions.name}{_SUFFIX}"
            latest = max(versions.glob(f"*{_SUFFIX}"), default=None)
            if latest is not None and latest.stat().st_size and not target.exists():
                with suppress(*UNREADABLE):  # damage is told when the session is used
                    files = read_chain(partial(_read_version, versions), int(latest.stem))
                    join_into(latest, files)
                latest.replace(target)
                sync_folder(folder)
            shutil.rmtree(versions)

    def scan(self) -> list[StoredSession]:
        """All sessions, oldest first; unreadable files are reported and left alone."""
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                notes, id = read_notes(path), path.name.removesuffix(_SUFFIX)
                files = [path, *self._changes_after(id, notes)]
                session = parse_notes(read_notes(files[-1]) if files[1:] else notes, id)
                session.used = files[-1].stat().st_mtime
                session.bytes = sum(file.stat().st_size for file in files)
                found.append(session)
            except UNREADABLE as error:
                _log.warning("the session file %s is not used: %s", path, error)
        return sorted(found, key=StoredSession.age)

    def _changes_after(self, id: str, notes: Mapping[str, Any]) -> list[Path]:
        """The changes after the whole file with these notes; earlier ones may be left over."""
        found = sorted((self._folder / f"{id}{_CHANGES}").glob(f"*{_SUFFIX}"))
        return [path for path in found if int(path.stem) > notes.get("version", 0)]

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
        notes = {
            "session": asdict(spec),
            "progress": asdict(progress),
            "answers": {str(number): answer.digest for number, answer in answers.items()},
            "keys": {str(number): answer.key for number, answer in answers.items() if answer.key},
            "saved": time.time(),
            "version": version + 1,
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
        self, adapter: Adapter, id: str, version: int = 0
    ) -> tuple[StoredSession, dict[int, Answer]]:
        """Let ``adapter`` continue where the session was, and return where that was.

        Raises:
            FencedError: It is another version than ``version`` already.
            DamagedError: Its files are not those that were written.

        """
        files = self._read(id, version)
        saved = unpack_state(adapter, fold(files), source="the session's file")
        keys = saved.notes.get("keys", {})
        answers = {
            int(number): Answer(
                digest, saved.extra[f"{_ANSWER}{number}"].numpy().tobytes(), keys.get(number, "")
            )
            for number, digest in saved.notes["answers"].items()
        }
        stored = parse_notes(saved.notes, id)
        stored.version = max(version, stored.version)
        return stored, answers

    def _write(self, id: str, data: bytes, version: int, whole: int) -> None:
        """Write what follows ``version``; earlier files than ``whole`` are not needed after it."""
        changes = self._folder / f"{id}{_CHANGES}"
        if whole > version:
            write_atomically(self._path(id), data, _PRIVATE)
            shutil.rmtree(changes, ignore_errors=True)
            return
        if not changes.exists():
            changes.mkdir()
            sync_folder(self._folder)
        write_atomically(changes / version_name(version + 1), data, _PRIVATE)

    def _read(self, id: str, version: int) -> list[bytes]:
        """The whole file of a session and the changes after it, to ``version`` at least."""
        try:
            whole = checked(self._path(id).read_bytes())
        except FileNotFoundError:
            raise DamagedError("the session's file is gone") from None
        changes = self._changes_after(id, notes_of(whole))
        files = [whole, *(checked(path.read_bytes()) for path in changes)]
        if notes_of(files[-1]).get("version", 0) < version:
            raise DamagedError("the session's last change is gone")
        return files

    def delete(self, id: str, version: int = 0) -> None:
        """Remove a session that was read as ``version``."""
        del version
        for path in (self._path(id), self._folder / f"{id}{_DELETE}"):
            path.unlink(missing_ok=True)
        sync_folder(self._folder)
        shutil.rmtree(self._folder / f"{id}{_CHANGES}", ignore_errors=True)

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
    saved, version = notes.get("saved", time.time()), notes.get("version", 0)
    return StoredSession(spec, Progress(**notes["progress"]), saved, version=version)


def read_notes(path: Path) -> dict[str, Any]:
    """The notes in the header of a session's file, a whole one or a change."""
    notes: dict[str, Any] = read_header(path, kind="session file")["notes"]
    return notes


def version_name(version: int) -> str:
    """The file of a version in a session's folder; names sort by version."""
    return f"{version:016d}{_SUFFIX}"


def _read_version(versions: Path, version: int) -> bytes:
    return (versions / version_name(version)).read_bytes()


def join_into(path: Path, files: Sequence[bytes]) -> None:
    """Replace the last file of a session by a whole one."""
    if len(files) > 1:
        write_atomically(path, _seal(fold(files)), _PRIVATE)


def read_chain(read: Callable[[int], bytes], version: int) -> list[bytes]:
    """The whole file that a version is based on, and the changes after it."""
    last = checked(read(version))
    first = notes_of(last).get("whole", version)
    return [*(checked(read(number)) for number in range(first, version)), last]


def _clean(folder: Path) -> None:
    """Remove what a server that was killed left behind."""
    for left in [*folder.glob(f".*{_SUFFIX}*.tmp"), *folder.glob(f"*/.*{_SUFFIX}*.tmp")]:
        left.unlink()
    for changes in folder.glob(f"*{_CHANGES}"):
        if not changes.with_suffix(_SUFFIX).exists():  # deleted
            shutil.rmtree(changes)


def _seal(data: bytes) -> bytes:
    """Put the hash of all bytes into the field that was left for it."""
    digest = hashlib.sha256(data).hexdigest().encode()
    return SEAL.sub(lambda found: found[1] + digest + b'\\"', data, count=1)


def checked(data: bytes) -> bytes:
    """The same bytes, if they are those that were sealed; files of version 0.1 have no seal."""
    seal = seal_of(data).encode()
    if seal and hashlib.sha256(data.replace(seal, UNSEALED, 1)).hexdigest().encode() != seal:
        raise DamagedError("the session's file is damaged: its checksum differs")
    return data


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
