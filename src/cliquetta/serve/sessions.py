"""All sessions of a server: those in memory, and the requests of clients for them.

A request for a session goes this way: read its version, and its memory if that is
another one than the one in memory here; work; write the next version with what changed;
respond.
"""

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cliquetta.errors import UserError
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.state import describe, pack_state, unpack_state
from cliquetta.serve.batches import BatchResult, is_new, predict_images, render_response
from cliquetta.serve.database import UnavailableError
from cliquetta.serve.errors import ServiceError, conflict, invalid, not_found
from cliquetta.serve.factory import build_adapter, change_classes, create_session
from cliquetta.serve.metrics import ServiceMetrics
from cliquetta.serve.pieces import DamagedError, SavedMemory
from cliquetta.serve.schema import (
    BatchRequest,
    ClassesRequest,
    SessionInfo,
    SessionRequest,
)
from cliquetta.serve.session_store import (
    ExistsError,
    SessionStore,
    StoredResponse,
    StoredSession,
    StoreSize,
)
from cliquetta.serve.settings import Settings

_log = logging.getLogger(__name__)


@dataclass
class Resident:
    """A session in memory: its row and memory as of one version, and its method."""

    stored: StoredSession
    saved: SavedMemory
    adapter: Adapter

    @property
    def bytes(self) -> int:
        """Size of its memory and of the start values beside it."""
        memory = self.adapter.memory
        return sum(2 * memory[name].nbytes for name in memory)


class Sessions:
    """All sessions of a database, a bounded number of them in memory.

    Requests for one session must not overlap here (the scheduler sees to it), except
    :meth:`info`. They raise :class:`OvertakenError` where another process has changed
    the session meanwhile.
    """

    def __init__(
        self, settings: Settings, store: SessionStore, metrics: ServiceMetrics
    ) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._store = store
        self._metrics = metrics
        self._tracing = settings.tracing
        self._lock = threading.Lock()
        self.residents: OrderedDict[str, Resident] = OrderedDict()
        self._busy: set[str] = set()
        self._failing = False  # whether the last attempt to write failed

    def owned_by(self, owner: str) -> list[SessionInfo]:
        """The sessions of ``owner``, oldest first."""
        with self._storage():
            return [one.info for one in self._store.find_all(owner)]

    def check_owner(self, owner: str, id: str) -> None:
        """Refuse unless there is such a session of ``owner``; those of others do not exist."""
        with self._storage():
            if self._store.owner_of(id) != owner:
                raise not_found("session")

    def info(self, owner: str, id: str) -> SessionInfo:
        """One session of ``owner``."""
        with self._storage():
            stored = self._store.find(id)
        if stored is None or stored.owner != owner:
            raise not_found("session")
        return stored.info

    def create(self, id: str, owner: str, request: SessionRequest) -> SessionInfo:
        """Build a session and write it; where there is one with this id already, return that."""
        with self._storage():
            if self._store.owner_of(id) is not None:
                return self.info(owner, id)
        info, adapter = create_session(request, self._settings, id)
        stored = StoredSession(info, owner, _description(adapter))
        saved, changed = SavedMemory.of(id, adapter.memory)

        def check_room(everybody: int, owned: int) -> None:
            if everybody >= self._limits.sessions:
                raise ServiceError(
                    429, "too_many_sessions", "the server cannot keep more sessions"
                )
            if owned >= self._limits.sessions_per_owner:
                message = f"you have {owned} sessions already: delete one"
                raise ServiceError(429, "too_many_sessions", message)

        try:
            with self._writing(id):
                stored = self._store.insert(
                    stored, saved, changed, check_room=check_room
                )
        except ExistsError:
            return self.info(owner, id)
        with self._lock:
            self.residents[id] = Resident(stored, saved, adapter)
            self._evict()
        return info

    def predict(self, id: str, request: BatchRequest) -> tuple[bytes, bool]:
        """The response as JSON, and whether it is a repeat.

        On return it is on disk with what was learned; on an exception the session is as
        it was.
        """
        start = time.perf_counter()
        digest = request.digest
        with self._using(id) as resident:
            last = resident.stored.info.sequence
            if not is_new(last, request.sequence):
                return self._repeat(id, request.sequence or 0, digest), True
            # An adapter that raises has rolled itself back: the session stays in
            # memory.
            result = self._run(resident, request)
            info = resident.stored.info
            progress = {
                "sequence": last + 1,
                "images": info.images + len(result.positions),
            }
            with self._dropped_on_error(id):
                info = info.model_copy(update=progress)
                body = render_response(info, request, result)
                response = StoredResponse.of(info.sequence, digest, body)
                self._save(
                    resident, replace(resident.stored, info=info), response=response
                )
        elapsed = time.perf_counter() - start
        self._metrics.images.labels("predicted").inc(len(result.positions))
        self._metrics.images.labels("refused").inc(len(result.refused))
        self._metrics.batch_seconds.labels(info.method).observe(elapsed)
        self._metrics.observe_health(info.method, result.prediction)
        return body, False

    def _repeat(self, id: str, sequence: int, digest: str) -> bytes:
        """The response to a batch that was applied before, if it is the same batch."""
        with self._storage():
            response = self._store.response(id, sequence)
        if response is None:
            message = f"batch {sequence} was applied; only the last {self._limits.replay} are kept"
            raise conflict("response_gone", message)
        if response.digest != digest:
            raise conflict(
                "sequence_used", f"number {sequence} was used for another batch"
            )
        self._metrics.replays.inc()
        return response.body

    def _run(self, resident: Resident, request: BatchRequest) -> BatchResult:
        info = resident.stored.info
        images = len(request.images)
        try:
            with self._tracing.span(
                "predict", session=info.id, method=info.method, images=images
            ):
                return predict_images(resident.adapter, request.images, self._limits)
        except Exception as error:
            if isinstance(error, ServiceError) or not resident.stored.imported:
                raise
            _log.warning(
                "session %s fails on its imported state", info.id, exc_info=error
            )
            message = "the imported state cannot be used: reset the session or import another one"
            raise invalid(message) from error

    def reset(self, id: str) -> SessionInfo:
        """Forget what was learned; batch numbers continue."""
        with self._using(id) as resident, self._dropped_on_error(id):
            resident.adapter.reset()
            self._save_completely(resident, replace(resident.stored, imported=False))
            return resident.stored.info

    def set_classes(self, id: str, request: ClassesRequest) -> SessionInfo:
        """Classify among other classes from the next batch on, keeping what was learned apart."""
        with self._using(id) as resident, self._dropped_on_error(id):
            before = resident.stored.info
            info, adapter = change_classes(
                request, before, resident.adapter, self._settings
            )
            if info is before:
                return info
            resident.adapter = adapter
            description = _description(adapter)
            changed = replace(resident.stored, info=info, adapter=description)
            self._save_completely(resident, changed)
            return info

    def export_state(self, id: str) -> bytes:
        """The state file of the session's method."""
        with self._using(id) as resident:
            return pack_state(resident.adapter)

    def import_state(self, id: str, data: bytes) -> SessionInfo:
        """Continue from a state of an equal session; batch numbers continue."""
        with self._using(id) as resident, self._dropped_on_error(id):
            try:
                unpack_state(resident.adapter, data)
            except UserError as error:
                raise invalid(str(error)) from error
            except Exception as error:
                raise invalid("not a state that can be read") from error
            self._save_completely(resident, replace(resident.stored, imported=True))
            return resident.stored.info

    def delete(self, id: str) -> None:
        """Remove a session from memory and disk."""
        with self._writing(id):
            deleted = self._store.delete(id)
        self._forget(id)
        if not deleted:
            raise not_found("session")

    def due(self) -> list[tuple[str, str]]:
        """Owner and id of all expired sessions."""
        if self._settings.session_days is None:
            return []
        with self._storage():
            return self._store.unused_since(self._oldest)

    def delete_due(self, id: str) -> None:
        """Delete a session if it is still :meth:`due` now."""
        with self._writing(id):
            if self._store.delete(id, unused_since=self._oldest):
                self._forget(id)

    @property
    def _oldest(self) -> float:
        """Time before which a session that was last used then is expired."""
        return time.time() - 86400 * (self._settings.session_days or 0)

    def shrink(self) -> None:
        """Give some disk space of deleted sessions back."""
        with self._storage():
            self._store.database.shrink()

    def check_health(self) -> None:
        """Refuse with the reason if sessions cannot be saved."""
        if self._store.database.free_bytes() < self._limits.free_bytes:
            raise ServiceError(
                503, "storage", "the disk of the sessions is full", retry_after=10
            )
        with self._storage():
            if self._failing:
                self._store.database.check()
            else:
                self._store.database.ping()
        self._failing = False

    def size(self) -> StoreSize:
        """Number and size of the sessions on disk."""
        with self._storage():
            return self._store.size()

    def _forget(self, id: str) -> None:
        with self._lock:
            self.residents.pop(id, None)

    @contextmanager
    def _using(self, id: str) -> Iterator[Resident]:
        """A session in memory as of now, from disk if need be, safe from eviction until the end."""
        with self._storage():
            version = self._store.version_of(id)
        if version == 0:
            self._forget(id)
            raise not_found("session")
        with self._lock:
            self._busy.add(id)
            resident = self.residents.get(id)
        try:
            if resident is None or resident.stored.version != version:
                resident = self._restore(id)
            yield resident
        finally:
            with self._lock:
                self._busy.discard(id)
                if id in self.residents:
                    self.residents.move_to_end(id)
                self._evict()

    def _restore(self, id: str) -> Resident:
        """Read a session back."""
        self._forget(id)
        with self._storage():
            found = self._store.load(id)
            if found is None:
                raise not_found("session")
            stored, saved = found
            message = "the server's models or methods have changed since this session was made"
            try:
                adapter = build_adapter(stored.info, self._settings)
                if _description(adapter) != stored.adapter:
                    raise conflict("not_served", message)
                adapter.load_state_dict(saved.tensors)
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("session %s cannot be restored: %s", id, error)
                raise conflict("not_served", message) from error
        saved.hold(adapter.memory)
        resident = Resident(stored, saved, adapter)
        with self._lock:
            self.residents[id] = resident
        self._metrics.restores.inc()
        return resident

    def _evict(self) -> None:
        """Evict idle sessions, least recently used first, until the limits hold."""
        limits = self._limits
        total = sum(resident.bytes for resident in self.residents.values())
        idle = [id for id in self.residents if id not in self._busy]
        for id in idle:
            count = len(self.residents)
            if count == 1:
                return
            if total <= limits.resident_bytes and count <= limits.resident_sessions:
                return
            evicted = self.residents.pop(id)
            total -= evicted.bytes
            self._metrics.evictions.inc()

    @contextmanager
    def _dropped_on_error(self, id: str) -> Iterator[None]:
        """Drop the half-changed memory of a session on any error; the disk has it as it was."""
        try:
            yield
        except BaseException:
            self._forget(id)
            raise

    def _save(
        self, resident: Resident, stored: StoredSession, *, response: StoredResponse
    ) -> None:
        """Write what a batch changed; it counts when this returns."""
        changed = resident.saved.update(resident.adapter.memory)
        with self._writing(stored.info.id):
            resident.stored = self._store.update(
                stored,
                resident.saved,
                changed,
                response=response,
                replay=self._limits.replay,
            )
        written = sum(len(piece.data) for piece in changed) + len(response.packed)
        self._metrics.written_bytes.inc(written)

    def _save_completely(self, resident: Resident, stored: StoredSession) -> None:
        """Write all of a session's memory instead of what was stored."""
        id = stored.info.id
        resident.saved, changed = SavedMemory.of(id, resident.adapter.memory)
        with self._writing(id):
            resident.stored = self._store.update(
                stored, resident.saved, changed, complete=True
            )

    @contextmanager
    def _writing(self, id: str) -> Iterator[None]:
        """A write to the database; whether it worked is what the health check tells."""
        try:
            with self._storage(), self._tracing.span("store.write", session=id):
                yield
        except ServiceError as error:
            self._failing = error.code == "storage"
            raise
        self._failing = False

    @contextmanager
    def _storage(self) -> Iterator[None]:
        """Errors of the database as refusals."""
        try:
            yield
        except UnavailableError as error:
            self._metrics.store_errors.inc()
            message = f"{error.sentence}: send the request again with the same sequence"
            raise ServiceError(
                503, "storage", message, retry_after=error.retry_after
            ) from error
        except DamagedError as error:
            _log.error("a session is damaged: %s", error)
            message = f"{error}; delete the session, or ask the operator for a backup"
            raise conflict("damaged", message) from error


def _description(adapter: Adapter) -> str:
    """What a memory belongs to, as JSON: the method, its config, the model and the classes."""
    return json.dumps(describe(adapter), sort_keys=True)
