"""All sessions of a server: one adapter each, a bounded number in memory, every one on disk."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from cliquetta.errors import UserError
from cliquetta.methods._shared.state import pack_state, unpack_state
from cliquetta.methods.base import Adapter
from cliquetta.serve.batches import Decoded, find_repeated, predict_images, render_answer
from cliquetta.serve.changes import Chain, DamagedError
from cliquetta.serve.errors import ServiceError, conflict, invalid, not_found
from cliquetta.serve.factory import build_adapter, change_classes, create_session, memory_bytes
from cliquetta.serve.metrics import Metrics
from cliquetta.serve.schema import BatchRequest, ClassesRequest, SessionInfo, SessionRequest
from cliquetta.serve.settings import Settings
from cliquetta.serve.shared_store import SharedStore
from cliquetta.serve.store import (
    Answer,
    FencedError,
    Progress,
    Store,
    StoredSession,
)
from cliquetta.types import Prediction

_log = logging.getLogger(__name__)
_ATTEMPTS = 3


@dataclass
class _Resident:
    """The part of a session that is in memory only while it is in use."""

    adapter: Adapter
    answers: dict[int, Answer]
    version: int
    chain: Chain = field(default_factory=Chain)

    @property
    def bytes(self) -> int:
        """Size of its memory, also as it is on disk, and of its answers."""
        answers = sum(len(answer.packed) for answer in self.answers.values())
        return memory_bytes(self.adapter) + self.chain.held_bytes + answers


P = ParamSpec("P")
T = TypeVar("T")


def _repeated(
    work: Callable[Concatenate[Sessions, str, P], T],
) -> Callable[Concatenate[Sessions, str, P], T]:
    """Do it again if another replica has written the session meanwhile, from where that one is."""

    @wraps(work)
    def attempt(self: Sessions, id: str, /, *given: P.args, **named: P.kwargs) -> T:
        for _ in range(_ATTEMPTS):
            try:
                return work(self, id, *given, **named)
            except FencedError as error:
                if error.ahead >= self._limits.replay:
                    break  # it may have been applied, and the answer is not kept any more
        message = "another replica works on this session: look at its sequence, then try again"
        raise ServiceError(503, "session_moved", message, retry_after=1)

    return attempt


class Sessions:
    """All sessions of a server, or of one of its replicas.

    :meth:`predict`, :meth:`reset`, :meth:`export_state`, :meth:`import_state` and :meth:`delete`
    of one session must not overlap (the scheduler sees to it); different sessions may.
    """

    def __init__(self, settings: Settings, store: Store, metrics: Metrics) -> None:
        self._settings, self._limits = settings, settings.limits
        self._store, self._metrics, self._tracing = store, metrics, settings.tracing
        self._lock = threading.Lock()
        self._entries = {stored.spec.id: stored for stored in store.scan()}
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        self._busy: set[str] = set()
        self._coming: list[str] = []  # owners of sessions under construction

    @property
    def shared(self) -> bool:
        """Whether other replicas work on them, too, so that to know them is to ask the store."""
        return isinstance(self._store, SharedStore)

    @property
    def count(self) -> int:
        """Sessions on disk."""
        return len(self._entries)

    @property
    def resident(self) -> int:
        """Sessions in memory."""
        return len(self._residents)

    @staticmethod
    def new_id() -> str:
        """A name that cannot be guessed."""
        return secrets.token_hex(16)

    def owned_by(self, owner: str) -> list[SessionInfo]:
        """The sessions of ``owner``, oldest first."""
        self._refresh()
        with self._lock:
            entries = [e for e in self._entries.values() if e.spec.owner == owner]
        return [_info(entry) for entry in entries]

    def info(self, owner: str, id: str) -> SessionInfo:
        """One session of ``owner``; those of others do not exist for it."""
        entry = self._present(id)
        if entry is None or entry.spec.owner != owner:
            raise not_found("session")
        return _info(entry)

    def create(self, owner: str, id: str, request: SessionRequest) -> SessionInfo:
        """Build a session and write it to disk; once, if a router asks two replicas for it."""
        if self._present(id) is not None:
            return self.info(owner, id)
        self._refresh()
        with self._room_for(owner):
            spec, adapter = create_session(request, self._settings, id=id, owner=owner)
            resident = _Resident(adapter, {}, 0)
            entry = StoredSession(spec, Progress(), time.time())
            try:
                self._save(entry, resident, entry.progress, {})
            except FencedError:
                return self.info(owner, id)
            with self._lock:
                self._entries[id] = entry
                self._residents[id] = resident
                self._evict()
        return _info(entry)

    @_repeated
    def predict(self, id: str, request: BatchRequest, key: str = "") -> tuple[bytes, bool]:
        """The answer as JSON, and whether it is a repeat of one given before.

        On return the answer and what was learned from the batch are on disk. On an exception the
        session is as it was. A request that has the ``key`` of one before is that request.
        """
        start = time.perf_counter()
        digest = request.digest
        with self._using(id) as (entry, resident):
            given = [answer for answer in resident.answers.values() if key and answer.key == key]
            known = next(iter(given), None) or find_repeated(
                entry.progress, resident.answers, request.sequence, digest
            )
            if known is not None:
                self._metrics.replays.inc()
                return known.body, True
            with self._whole(id):
                decoded, prediction = self._compute(entry, resident.adapter, request)
                number = entry.progress.sequence + 1
                body = render_answer(entry.spec, number, request, decoded, prediction)
                answers = {**resident.answers, number: Answer.of(digest, body, key)}
                for old in sorted(answers)[: -self._limits.replay]:
                    del answers[old]
                images = entry.progress.images + len(decoded.places)
                progress = replace(entry.progress, sequence=number, images=images)
                self._commit(entry, resident, progress, answers)
            self._metrics.images.labels("predicted").inc(len(decoded.places))
            self._metrics.images.labels("refused").inc(len(decoded.refused))
            elapsed = time.perf_counter() - start
            self._metrics.batch_seconds.labels(entry.spec.method).observe(elapsed)
            self._metrics.observe_health(entry.spec.method, prediction)
        return body, False

    def _compute(
        self, entry: StoredSession, adapter: Adapter, request: BatchRequest
    ) -> tuple[Decoded, Prediction]:
        known = {"session": entry.spec.id, "method": entry.spec.method}
        try:
            with self._tracing.span("predict", **known, images=len(request.images)):
                return predict_images(adapter, request.images, self._limits)
        except ServiceError:
            raise
        except Exception as error:
            if not entry.progress.imported:
                raise
            _log.warning("session %s fails on its imported state", entry.spec.id, exc_info=error)
            message = "the imported state cannot be used: reset the session or import another one"
            raise invalid(message) from error

    @_repeated
    def reset(self, id: str) -> SessionInfo:
        """Forget what was learned; batch numbers continue."""
        with self._using(id) as (entry, resident), self._whole(id):
            resident.adapter.reset()
            progress = replace(entry.progress, imported=False)
            self._commit(entry, resident, progress, resident.answers)
            return _info(entry)

    @_repeated
    def set_classes(self, id: str, request: ClassesRequest) -> SessionInfo:
        """Classify among other classes from the next batch on; batch numbers continue.

        What was learned apart from the classes is kept. On return it is on disk; on an exception
        the session is as it was. The list that it has already changes nothing.
        """
        with self._using(id) as (entry, resident), self._whole(id):
            spec, adapter = change_classes(request, entry.spec, resident.adapter, self._settings)
            if spec is entry.spec:
                return _info(entry)
            resident.adapter, resident.chain = adapter, Chain()
            changed = replace(entry, spec=spec)
            self._commit(changed, resident, entry.progress, resident.answers)
            with self._lock:
                self._entries[id] = changed
            return _info(changed)

    @_repeated
    def export_state(self, id: str) -> bytes:
        """What was learned, as a file that ``load_state`` reads."""
        with self._using(id) as (_, resident):
            return pack_state(resident.adapter)

    @_repeated
    def import_state(self, id: str, data: bytes) -> SessionInfo:
        """Continue from a state of an equal session; batch numbers continue."""
        with self._using(id) as (entry, resident), self._whole(id):
            try:
                unpack_state(resident.adapter, data)
            except UserError as error:
                raise invalid(str(error)) from error
            except Exception as error:
                raise invalid("not a state that can be read") from error
            progress = replace(entry.progress, imported=True)
            self._commit(entry, resident, progress, resident.answers)
            return _info(entry)

    @_repeated
    def delete(self, id: str) -> None:
        """Remove a session from memory and disk."""
        with self._using(id, restore=False) as (entry, _), self._storage():
            self._store.delete(id, entry.version)
            with self._lock:
                self._entries.pop(id, None)
                self._residents.pop(id, None)

    def due(self) -> list[tuple[str, str]]:
        """Owner and id of all sessions to delete: expired, or asked for by the operator."""
        self._refresh()
        if isinstance(self._store, SharedStore):
            self._store.collect()
        asked = set(self._store.deletions())
        for unknown in asked - self._entries.keys():
            self._store.delete(unknown)  # a file that was not used, or one that is gone
        with self._lock:
            return [
                (entry.spec.owner, id)
                for id, entry in self._entries.items()
                if id in asked or self._is_expired(entry)
            ]

    def delete_due(self, id: str) -> None:
        """Delete a session if it is still :meth:`due` now."""
        if id in {id for _, id in self.due()}:
            self.delete(id)

    def _is_expired(self, entry: StoredSession) -> bool:
        days = self._settings.session_days
        return days is not None and time.time() - entry.used > 86400 * days

    def problem(self) -> str | None:
        """Why sessions cannot be saved, if they cannot."""
        if self._store.free_bytes() < self._limits.free_bytes:
            return "the disk of the sessions is full"
        return "the last session could not be saved" if self._store.failing else None

    def _commit(
        self,
        entry: StoredSession,
        resident: _Resident,
        progress: Progress,
        answers: dict[int, Answer],
    ) -> None:
        self._save(entry, resident, progress, answers)
        entry.progress, entry.used, resident.answers = progress, time.time(), answers

    def _save(
        self,
        entry: StoredSession,
        resident: _Resident,
        progress: Progress,
        answers: dict[int, Answer],
    ) -> None:
        with self._storage(), self._tracing.span("store.write", session=entry.spec.id):
            version = self._store.save(
                resident.adapter, entry.spec, progress, answers, entry.version, resident.chain
            )
        entry.version = resident.version = version

    def _refresh(self) -> None:
        """Learn what other replicas have made, changed and deleted since."""
        if isinstance(self._store, SharedStore):
            with self._storage():
                found = self._store.scan(dict(self._entries))
            with self._lock:
                self._entries = {entry.spec.id: entry for entry in found}

    def _present(self, id: str) -> StoredSession | None:
        """A session as it is now, also if another replica has made or changed it."""
        entry = self._entries.get(id)
        if not isinstance(self._store, SharedStore):
            return entry
        with self._storage():
            if entry is not None and entry.version == self._store.version(id):
                return entry
            entry = self._store.find(id)
        with self._lock:
            if entry is None:
                self._entries.pop(id, None)
                self._residents.pop(id, None)
            else:
                self._entries[id] = entry
        return entry

    @contextmanager
    def _using(self, id: str, *, restore: bool = True) -> Iterator[tuple[StoredSession, Any]]:
        """A session in memory, from disk if need be, safe from eviction until the end."""
        entry = self._present(id)
        if entry is None:
            raise not_found("session")
        with self._lock:
            self._busy.add(id)
            resident = self._residents.get(id)
        try:
            if restore and (resident is None or resident.version != entry.version):
                resident = self._restore(entry)
            yield entry, resident
        finally:
            with self._lock:
                self._busy.discard(id)
                if id in self._residents:
                    self._residents.move_to_end(id)
                self._evict()

    def _restore(self, entry: StoredSession) -> _Resident:
        """Read a session back; where it stands is what the disk says."""
        with self._storage():
            try:
                adapter = build_adapter(entry.spec, self._settings)
                stored, answers = self._store.load(adapter, entry.spec.id, entry.version)
                entry.progress, entry.version = stored.progress, stored.version
            except DamagedError as error:
                _log.error("session %s: %s", entry.spec.id, error)
                message = f"{error}; delete the session, or ask the operator for a backup"
                raise conflict("damaged", message) from error
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("session %s cannot be restored: %s", entry.spec.id, error)
                message = "the server's models or methods have changed since this session was made"
                raise conflict("not_served", message) from error
        resident = _Resident(adapter, answers, entry.version)
        with self._lock:
            self._residents[entry.spec.id] = resident
        self._metrics.restores.inc()
        return resident

    def _evict(self) -> None:
        """Evict idle sessions, least recently used first, until the limits hold."""
        total = sum(resident.bytes for resident in self._residents.values())
        for id in [id for id in self._residents if id not in self._busy]:
            fits = total <= self._limits.resident_bytes
            if (fits and len(self._residents) <= self._limits.resident_sessions) or (
                len(self._residents) == 1
            ):
                return
            total -= self._residents.pop(id).bytes
            self._metrics.evictions.inc()

    @contextmanager
    def _whole(self, id: str) -> Iterator[None]:
        """Drop the half-changed memory of a session on any error; the disk has the whole one."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._residents.pop(id, None)
            raise

    @contextmanager
    def _room_for(self, owner: str) -> Iterator[None]:
        """Reserve one more session for ``owner``."""
        with self._lock:
            owners = [e.spec.owner for e in self._entries.values()] + self._coming
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


def _info(entry: StoredSession) -> SessionInfo:
    made = {name: value for name, value in asdict(entry.spec).items() if name != "owner"}
    progress = entry.progress
    return SessionInfo(**made, sequence=progress.sequence, images=progress.images)
