"""All sessions of a server: those in memory, and the requests of clients for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter
from cliquetta.methods.state import pack_state, unpack_state
from cliquetta.serve.batches import BatchResult, find_repeated, predict_images, render_response
from cliquetta.serve.changes import Chain, DamagedError
from cliquetta.serve.errors import ServiceError, conflict, invalid, not_found
from cliquetta.serve.factory import build_adapter, change_classes, create_session
from cliquetta.serve.metrics import ServiceMetrics
from cliquetta.serve.schema import BatchRequest, ClassesRequest, SessionInfo, SessionRequest
from cliquetta.serve.settings import Settings
from cliquetta.serve.store import FencedError, Resident, Store, StoredResponse, StoredSession

_log = logging.getLogger(__name__)


class Sessions:
    """All sessions of a store, a bounded number of them in memory.

    Requests for one session must not overlap (the scheduler sees to it), except :meth:`info`. They
    raise :class:`FencedError` where another replica has written the session meanwhile.
    """

    def __init__(self, settings: Settings, store: Store, metrics: ServiceMetrics) -> None:
        self._settings, self._limits = settings, settings.limits
        self._store, self._metrics, self._tracing = store, metrics, settings.tracing
        self._lock = threading.Lock()
        self.entries = {stored.info.id: stored for stored in store.scan()}
        self.residents: OrderedDict[str, Resident] = OrderedDict()
        self._busy: set[str] = set()
        self._coming: list[str] = []  # owners of sessions under construction

    def owned_by(self, owner: str) -> list[SessionInfo]:
        """The sessions of ``owner``, oldest first."""
        return [entry.info for entry in self._refresh() if entry.owner == owner]

    def info(self, owner: str, id: str) -> SessionInfo:
        """One session of ``owner``; those of others do not exist for it."""
        entry = self._find(id)
        if entry is None or entry.owner != owner:
            raise not_found("session")
        return entry.info

    def create(self, id: str, owner: str, request: SessionRequest) -> SessionInfo:
        """Build a session and write it to disk; once, if a router asks two replicas for it."""
        if self._find(id) is not None:
            return self.info(owner, id)
        self._refresh()
        with self._room_for(owner):
            info, adapter = create_session(request, self._settings, id)
            resident = Resident(adapter)
            try:
                self._save(StoredSession(info, owner, time.time()), resident)
            except FencedError:
                return self.info(owner, id)
            with self._lock:
                self.residents[id] = resident
                self._evict()
        return info

    def predict(self, id: str, request: BatchRequest, key: str = "") -> tuple[bytes, bool]:
        """The response as JSON, and whether it is a repeat; a request is known by its ``key``, too.

        On return it is on disk with what was learned; on an exception the session is as it was.
        """
        start = time.perf_counter()
        digest = request.digest
        with self._using(id) as (entry, resident):
            last, responses = entry.info.sequence, resident.responses
            stored = find_repeated(last, responses, request.sequence, digest, key)
            if stored is not None:
                self._metrics.replays.inc()
                return stored.body, True
            # An adapter that raises has rolled itself back: the session stays in memory.
            result = self._run(entry, resident.adapter, request)
            predicted, refused = len(result.positions), len(result.refused)
            with self._dropped_on_error(id):
                progress = {"sequence": last + 1, "images": entry.info.images + predicted}
                info = entry.info.model_copy(update=progress)
                body = render_response(info, request, result)
                # a new dictionary: other threads count the bytes of this one
                responses = {**responses, info.sequence: StoredResponse.of(digest, body, key)}
                latest = sorted(responses)[-self._limits.replay :]
                resident.responses = {number: responses[number] for number in latest}
                self._save(replace(entry, info=info), resident)
            self._metrics.images.labels("predicted").inc(predicted)
            self._metrics.images.labels("refused").inc(refused)
            elapsed = time.perf_counter() - start
            self._metrics.batch_seconds.labels(entry.info.method).observe(elapsed)
            self._metrics.observe_health(entry.info.method, result.prediction)
        return body, False

    def _run(self, entry: StoredSession, adapter: Adapter, request: BatchRequest) -> BatchResult:
        attributes = {"session": entry.info.id, "method": entry.info.method}
        try:
            with self._tracing.span("predict", **attributes, images=len(request.images)):
                return predict_images(adapter, request.images, self._limits)
        except Exception as error:
            if isinstance(error, ServiceError) or not entry.imported:
                raise
            _log.warning("session %s fails on its imported state", entry.info.id, exc_info=error)
            message = "the imported state cannot be used: reset the session or import another one"
            raise invalid(message) from error

    def reset(self, id: str) -> SessionInfo:
        """Forget what was learned; batch numbers continue."""
        with self._using(id) as (entry, resident), self._dropped_on_error(id):
            resident.adapter.reset()
            return self._save(replace(entry, imported=False), resident)

    def set_classes(self, id: str, request: ClassesRequest) -> SessionInfo:
        """Classify among other classes from the next batch on, keeping what was learned apart."""
        with self._using(id) as (entry, resident), self._dropped_on_error(id):
            info, adapter = change_classes(request, entry.info, resident.adapter, self._settings)
            if info is entry.info:
                return info
            resident.adapter, resident.chain = adapter, Chain()
            return self._save(replace(entry, info=info), resident)

    def export_state(self, id: str) -> bytes:
        """The state file of the session's method."""
        with self._using(id) as (_, resident):
            return pack_state(resident.adapter)

    def import_state(self, id: str, data: bytes) -> SessionInfo:
        """Continue from a state of an equal session; batch numbers continue."""
        with self._using(id) as (entry, resident), self._dropped_on_error(id):
            try:
                unpack_state(resident.adapter, data)
            except UserError as error:
                raise invalid(str(error)) from error
            except Exception as error:
                raise invalid("not a state that can be read") from error
            return self._save(replace(entry, imported=True), resident)

    def delete(self, id: str) -> None:
        """Remove a session from memory and disk."""
        entry = self._find(id)
        if entry is None:
            raise not_found("session")
        with self._storage():
            self._store.delete(id, entry.version)
        self._forget(id)

    def due(self) -> list[tuple[str, str]]:
        """Owner and id of all expired sessions."""
        with self._storage():
            self._store.collect()
        entries = filter(self._is_expired, self._refresh())
        return [(entry.owner, entry.info.id) for entry in entries]

    def delete_due(self, id: str) -> None:
        """Delete a session if it is still :meth:`due` now."""
        entry = self._find(id)
        if entry is not None and self._is_expired(entry):
            self.delete(id)

    def _is_expired(self, entry: StoredSession) -> bool:
        days = self._settings.session_days
        return days is not None and time.time() - entry.used > 86400 * days

    def problem(self) -> str | None:
        """Why sessions cannot be saved, if they cannot."""
        if self._store.files.free_bytes() < self._limits.free_bytes:
            return "the disk of the sessions is full"
        return "the last session could not be saved" if self._store.failing else None

    def _refresh(self) -> list[StoredSession]:
        """All sessions, with what other processes have made, changed and deleted since."""
        with self._storage():
            stored = self._store.scan(dict(self.entries))
        with self._lock:
            self.entries = {entry.info.id: entry for entry in stored}
            for id in self.residents.keys() - self.entries.keys() - self._busy:
                del self.residents[id]
        return stored

    def _find(self, id: str) -> StoredSession | None:
        """A session as it is now, also if another process has made or changed it."""
        entry = self.entries.get(id)
        known = 0 if entry is None else entry.version
        with self._storage():
            version, _ = self._store.present(id, max(1, known))
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

    def _forget(self, id: str) -> None:
        with self._lock:
            self.entries.pop(id, None)
            self.residents.pop(id, None)

    @contextmanager
    def _using(self, id: str) -> Iterator[tuple[StoredSession, Resident]]:
        """A session in memory, from disk if need be, safe from eviction until the end."""
        entry = self._find(id)
        if entry is None:
            raise not_found("session")
        with self._lock:
            self._busy.add(id)
            resident = self.residents.get(id)
        try:
            if resident is None or resident.version != entry.version:
                entry, resident = self._restore(entry)
            yield entry, resident
        finally:
            with self._lock:
                self._busy.discard(id)
                if id in self.residents:
                    self.residents.move_to_end(id)
                self._evict()

    def _restore(self, entry: StoredSession) -> tuple[StoredSession, Resident]:
        """Read a session back; its progress is what the disk says."""
        id = entry.info.id
        with self._storage():
            try:
                adapter = build_adapter(entry.info, self._settings)
                stored, resident = self._store.load(adapter, id, entry.version)
            except DamagedError as error:
                _log.error("session %s: %s", id, error)
                raise _damaged(str(error)) from error
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("session %s cannot be restored: %s", id, error)
                message = "the server's models or methods have changed since this session was made"
                raise conflict("not_served", message) from error
        entry = replace(entry, info=stored.info, imported=stored.imported)
        with self._lock:
            self.entries[id], self.residents[id] = entry, resident
        self._metrics.restores.inc()
        return entry, resident

    def _evict(self) -> None:
        """Evict idle sessions, least recently used first, until the limits hold."""
        total = sum(resident.bytes for resident in self.residents.values())
        for id in [id for id in self.residents if id not in self._busy]:
            count, limits = len(self.residents), self._limits
            fits = total <= limits.resident_bytes and count <= limits.resident_sessions
            if fits or count == 1:
                return
            total -= self.residents.pop(id).bytes
            self._metrics.evictions.inc()

    @contextmanager
    def _dropped_on_error(self, id: str) -> Iterator[None]:
        """Drop the half-changed memory of a session on any error; the disk has it as it was."""
        try:
            yield
        except BaseException:
            with self._lock:
                self.residents.pop(id, None)
            raise

    def _save(self, entry: StoredSession, resident: Resident) -> SessionInfo:
        """Write a session as it is now; it counts when this returns."""
        with self._storage(), self._tracing.span("store.write", session=entry.info.id):
            self._store.save(entry, resident)
        entry.used = time.time()
        with self._lock:
            self.entries[entry.info.id] = entry
        return entry.info

    @contextmanager
    def _room_for(self, owner: str) -> Iterator[None]:
        """Reserve one more session for ``owner``."""
        with self._lock:
            owners = [entry.owner for entry in self.entries.values()] + self._coming
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
    def _storage(self) -> Iterator[None]:
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
