"""The sessions in memory: restored for use, evicted when idle."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cliquetta.methods.base import Adapter
from cliquetta.serve.changes import Chain, DamagedError
from cliquetta.serve.errors import ServiceError, conflict, not_found
from cliquetta.serve.factory import build_adapter, memory_bytes
from cliquetta.serve.metrics import ServiceMetrics
from cliquetta.serve.settings import Settings
from cliquetta.serve.store import Progress, Store, StoredResponse, StoredSession

_log = logging.getLogger(__name__)


@dataclass
class Resident:
    """The part of a session that is in memory only while it is in use."""

    adapter: Adapter
    answers: dict[int, StoredResponse] = field(default_factory=dict)
    version: int = 0
    chain: Chain = field(default_factory=Chain)

    @property
    def bytes(self) -> int:
        """Size of its memory, also as it is on disk, and of its answers."""
        answers = sum(len(answer.packed) for answer in self.answers.values())
        return memory_bytes(self.adapter) + self.chain.held_bytes + answers


class SessionCache:
    """All sessions of a store, a bounded number of them in memory."""

    def __init__(self, settings: Settings, store: Store, metrics: ServiceMetrics) -> None:
        self._settings, self._limits = settings, settings.limits
        self._store, self._metrics = store, metrics
        self._lock = threading.Lock()
        self.entries = {stored.spec.id: stored for stored in store.scan()}
        self.residents: OrderedDict[str, Resident] = OrderedDict()
        self._busy: set[str] = set()
        self._coming: list[str] = []  # owners of sessions under construction

    def refresh(self) -> list[StoredSession]:
        """All sessions, with what other processes have made, changed and deleted since."""
        with self.storage():
            found = self._store.scan(dict(self.entries))
        with self._lock:
            self.entries = {entry.spec.id: entry for entry in found}
            for id in self.residents.keys() - self.entries.keys() - self._busy:
                del self.residents[id]
        return found

    def find(self, id: str) -> StoredSession | None:
        """A session as it is now, also if another process has made or changed it."""
        entry = self.entries.get(id)
        known = 0 if entry is None else entry.version
        with self.storage():
            version = self._store.version(id, known)
            if version < known:
                raise _damaged("the session's last change is gone")
            if entry is not None and version == known:
                return entry
            entry = self._store.find(id)
        if entry is None:
            self._forget(id)
        else:
            with self._lock:
                self.entries[id] = entry
        return entry

    @contextmanager
    def using(self, id: str) -> Iterator[tuple[StoredSession, Resident]]:
        """A session in memory, from disk if need be, safe from eviction until the end."""
        entry = self.find(id)
        if entry is None:
            raise not_found("session")
        with self._lock:
            self._busy.add(id)
            resident = self.residents.get(id)
        try:
            if resident is None or resident.version != entry.version:
                resident = self._restore(entry)
            yield entry, resident
        finally:
            with self._lock:
                self._busy.discard(id)
                if id in self.residents:
                    self.residents.move_to_end(id)
                self._evict()

    def _restore(self, entry: StoredSession) -> Resident:
        """Read a session back; where it stands is what the disk says."""
        with self.storage():
            try:
                adapter = build_adapter(entry.spec, self._settings)
                stored, answers = self._store.load(adapter, entry.spec.id, entry.version)
                entry.progress, entry.version = stored.progress, stored.version
            except DamagedError as error:
                _log.error("session %s: %s", entry.spec.id, error)
                raise _damaged(str(error)) from error
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("session %s cannot be restored: %s", entry.spec.id, error)
                message = "the server's models or methods have changed since this session was made"
                raise conflict("not_served", message) from error
        resident = Resident(adapter, answers, entry.version)
        with self._lock:
            self.residents[entry.spec.id] = resident
        self._metrics.restores.inc()
        return resident

    def _evict(self) -> None:
        """Evict idle sessions, least recently used first, until the limits hold."""
        total = sum(resident.bytes for resident in self.residents.values())
        for id in [id for id in self.residents if id not in self._busy]:
            fits = total <= self._limits.resident_bytes
            if (fits and len(self.residents) <= self._limits.resident_sessions) or (
                len(self.residents) == 1
            ):
                return
            total -= self.residents.pop(id).bytes
            self._metrics.evictions.inc()

    @contextmanager
    def whole(self, id: str) -> Iterator[None]:
        """Drop the half-changed memory of a session on any error; the disk has the whole one."""
        try:
            yield
        except BaseException:
            with self._lock:
                self.residents.pop(id, None)
            raise

    def save(
        self,
        entry: StoredSession,
        resident: Resident,
        progress: Progress,
        answers: dict[int, StoredResponse],
    ) -> None:
        """Write a session as it is now; it counts when this returns."""
        tracing, spec, chain = self._settings.tracing, entry.spec, resident.chain
        with self.storage(), tracing.span("store.write", session=spec.id):
            entry.version = resident.version = self._store.save(
                resident.adapter, spec, progress, answers, entry.version, chain
            )
        entry.progress, entry.used, resident.answers = progress, time.time(), answers
        with self._lock:
            self.entries[spec.id] = entry

    def add(self, entry: StoredSession, resident: Resident) -> None:
        """Write a new session."""
        self.save(entry, resident, entry.progress, resident.answers)
        with self._lock:
            self.residents[entry.spec.id] = resident
            self._evict()

    def delete(self, id: str) -> None:
        """Remove a session from memory and disk."""
        entry = self.find(id)
        if entry is None:
            raise not_found("session")
        with self.storage():
            self._store.delete(id, entry.version)
        self._forget(id)

    def _forget(self, id: str) -> None:
        with self._lock:
            self.entries.pop(id, None)
            self.residents.pop(id, None)

    @contextmanager
    def room_for(self, owner: str) -> Iterator[None]:
        """Reserve one more session for ``owner``."""
        with self._lock:
            owners = [e.spec.owner for e in self.entries.values()] + self._coming
            if len(owners) >= self._limits.sessions:
                raise ServiceError(429, "too_many_sessions", "the server cannot keep more sessions")
            if owners.count(owner) >= self._limits.sessions_per_owner:
                message = f"you have {owners.count(owner)} sessions already: delete one"
                raise ServiceError(429, "too_many_sessions", message)
            self._coming.append(owner)
        try:
            yield
        finally:
            with self._lock:
                self._coming.remove(owner)

    @contextmanager
    def storage(self) -> Iterator[None]:
        """Disk errors as a refusal that may be retried."""
        try:
            yield
        except OSError as error:
            self._metrics.store_errors.inc()
            _log.error("session store: %s", error)
            message = "the server's disk cannot be used; nothing was changed"
            raise ServiceError(503, "storage", message, retry_after=10) from error


def _damaged(what: str) -> ServiceError:
    return conflict("damaged", f"{what}; delete the session, or ask the operator for a backup")
