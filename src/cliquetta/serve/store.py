"""Sessions on disk: one safetensors file each, replaced as a whole after every change.

A file holds everything: how the session was made, what its method remembers, how many batches it
has answered and the last answers themselves. So one rename is the moment at which a batch counts,
and a server that is killed at any time finds each session before or after a batch, never between.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cliquetta.atomic import exclusive, sync_folder
from cliquetta.methods._shared.state import load_state, read_header, save_state
from cliquetta.methods.base import Adapter

_SUFFIX = ".safetensors"
_ANSWER = "answer."

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionSpec:
    """How a session was made; nothing of it ever changes."""

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


@dataclass(frozen=True)
class Progress:
    """How far a session has come."""

    sequence: int = 0
    """Number of the last batch that was answered."""
    images: int = 0
    """Predicted so far."""


@dataclass(frozen=True)
class Answer:
    """An answer that was given, with what it answered."""

    digest: str
    """Hash of the request."""
    packed: bytes
    """The body, compressed."""

    @classmethod
    def of(cls, digest: str, body: bytes) -> Answer:
        """Keep ``body`` as the answer to the request with ``digest``."""
        return cls(digest, zlib.compress(body, 1))

    @property
    def body(self) -> bytes:
        """The answer as it was sent."""
        return zlib.decompress(self.packed)


@dataclass(frozen=True)
class Kept:
    """What a file says about its session, without the memory of the method."""

    spec: SessionSpec
    progress: Progress


class Store:
    """A folder of sessions. File names come from ids that the server made, never from clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

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
            yield cls(path)

    def scan(self) -> list[Kept]:
        """All sessions, oldest first; unreadable files are reported and left alone."""
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                notes = read_header(path)["notes"]
                found.append(_kept(notes))
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("left out the session in %s: %s", path, error)
        return sorted(found, key=lambda kept: (kept.spec.created, kept.spec.id))

    def save(
        self, adapter: Adapter, spec: SessionSpec, progress: Progress, answers: Mapping[int, Answer]
    ) -> None:
        """Replace the file of a session; it is on disk when this returns."""
        notes = {
            "session": asdict(spec),
            "progress": asdict(progress),
            "answers": {str(number): answer.digest for number, answer in answers.items()},
        }
        extra = {f"{_ANSWER}{number}": _tensor(a.packed) for number, a in answers.items()}
        save_state(adapter, self._path(spec.id), extra=extra, notes=notes)

    def load(self, adapter: Adapter, id: str) -> tuple[Progress, dict[int, Answer]]:
        """Let ``adapter`` continue where the session stood, and return where that was."""
        saved = load_state(adapter, self._path(id))
        answers = {
            int(number): Answer(digest, saved.extra[f"{_ANSWER}{number}"].numpy().tobytes())
            for number, digest in saved.notes["answers"].items()
        }
        return _kept(saved.notes).progress, answers

    def delete(self, id: str) -> None:
        """Forget a session."""
        self._path(id).unlink(missing_ok=True)
        sync_folder(self._folder)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}{_SUFFIX}"


def _kept(notes: Mapping[str, Any]) -> Kept:
    values = dict(notes["session"])
    for name in ("classes", "templates"):
        values[name] = tuple(values[name])
    return Kept(SessionSpec(**values), Progress(**notes["progress"]))


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
