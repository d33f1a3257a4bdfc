"""The requests of clients for their sessions: make, predict, reset, classes, states, delete."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter
from cliquetta.methods.state import pack_state, unpack_state
from cliquetta.serve.batches import Decoded, find_repeated, predict_images, render_response
from cliquetta.serve.changes import Chain
from cliquetta.serve.errors import ServiceError, invalid, not_found
from cliquetta.serve.factory import change_classes, create_session
from cliquetta.serve.metrics import ServiceMetrics
from cliquetta.serve.schema import BatchRequest, ClassesRequest, SessionInfo, SessionRequest
from cliquetta.serve.session_cache import Resident, SessionCache
from cliquetta.serve.settings import Settings
from cliquetta.serve.store import FencedError, Progress, Store, StoredResponse, StoredSession
from cliquetta.types import Prediction

_log = logging.getLogger(__name__)
_ATTEMPTS = 3

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

    def __init__(self, settings: Settings, store: Store, metrics: ServiceMetrics) -> None:
        self._settings, self._limits = settings, settings.limits
        self._store, self._metrics, self._tracing = store, metrics, settings.tracing
        self._cache = SessionCache(settings, store, metrics)

    @property
    def count(self) -> int:
        """Sessions on disk."""
        return len(self._cache.entries)

    @property
    def resident(self) -> int:
        """Sessions in memory."""
        return len(self._cache.residents)

    def owned_by(self, owner: str) -> list[SessionInfo]:
        """The sessions of ``owner``, oldest first."""
        return [_info(entry) for entry in self._cache.refresh() if entry.spec.owner == owner]

    def info(self, owner: str, id: str) -> SessionInfo:
        """One session of ``owner``; those of others do not exist for it."""
        entry = self._cache.find(id)
        if entry is None or entry.spec.owner != owner:
            raise not_found("session")
        return _info(entry)

    def create(self, owner: str, id: str, request: SessionRequest) -> SessionInfo:
        """Build a session and write it to disk; once, if a router asks two replicas for it."""
        if self._cache.find(id) is not None:
            return self.info(owner, id)
        self._cache.refresh()
        with self._cache.room_for(owner):
            spec, adapter = create_session(request, self._settings, id=id, owner=owner)
            entry = StoredSession(spec, Progress(), time.time())
            try:
                self._cache.add(entry, Resident(adapter))
            except FencedError:
                return self.info(owner, id)
        return _info(entry)

    @_repeated
    def predict(self, id: str, request: BatchRequest, key: str = "") -> tuple[bytes, bool]:
        """The response as JSON, and whether it is a repeat of one given before.

        On return the response and what was learned from the batch are on disk. On an exception the
        session is as it was. A request that has the ``key`` of one before is that request.
        """
        start = time.perf_counter()
        digest = request.digest
        with self._cache.using(id) as (entry, resident):
            given = [answer for answer in resident.answers.values() if key and answer.key == key]
            known = next(iter(given), None) or find_repeated(
                entry.progress, resident.answers, request.sequence, digest
            )
            if known is not None:
                self._metrics.replays.inc()
                return known.body, True
            # An adapter that raises has rolled itself back: the session stays in memory.
            decoded, prediction = self._compute(entry, resident.adapter, request)
            with self._cache.whole(id):
                number = entry.progress.sequence + 1
                body = render_response(entry.spec, number, request, decoded, prediction)
                answers = {**resident.answers, number: StoredResponse.of(digest, body, key)}
                for old in sorted(answers)[: -self._limits.replay]:
                    del answers[old]
                images = entry.progress.images + len(decoded.positions)
                progress = replace(entry.progress, sequence=number, images=images)
                self._cache.save(entry, resident, progress, answers)
            self._metrics.images.labels("predicted").inc(len(decoded.positions))
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
        with self._cache.using(id) as (entry, resident), self._cache.whole(id):
            resident.adapter.reset()
            progress = replace(entry.progress, imported=False)
            self._cache.save(entry, resident, progress, resident.answers)
            return _info(entry)

    @_repeated
    def set_classes(self, id: str, request: ClassesRequest) -> SessionInfo:
        """Classify among other classes from the next batch on; batch numbers continue.

        What was learned apart from the classes is kept. On return it is on disk; on an exception
        the session is as it was. The list that it has already changes nothing.
        """
        with self._cache.using(id) as (entry, resident), self._cache.whole(id):
            spec, adapter = change_classes(request, entry.spec, resident.adapter, self._settings)
            if spec is entry.spec:
                return _info(entry)
            resident.adapter, resident.chain = adapter, Chain()
            changed = replace(entry, spec=spec)
            self._cache.save(changed, resident, entry.progress, resident.answers)
            return _info(changed)

    @_repeated
    def export_state(self, id: str) -> bytes:
        """The state file of the session's method."""
        with self._cache.using(id) as (_, resident):
            return pack_state(resident.adapter)

    @_repeated
    def import_state(self, id: str, data: bytes) -> SessionInfo:
        """Continue from a state of an equal session; batch numbers continue."""
        with self._cache.using(id) as (entry, resident), self._cache.whole(id):
            try:
                unpack_state(resident.adapter, data)
            except UserError as error:
                raise invalid(str(error)) from error
            except Exception as error:
                raise invalid("not a state that can be read") from error
            progress = replace(entry.progress, imported=True)
            self._cache.save(entry, resident, progress, resident.answers)
            return _info(entry)

    @_repeated
    def delete(self, id: str) -> None:
        """Remove a session from memory and disk."""
        self._cache.delete(id)

    def due(self) -> list[tuple[str, str]]:
        """Owner and id of all expired sessions."""
        with self._cache.storage():
            self._store.collect()
        entries = filter(self._is_expired, self._cache.refresh())
        return [(entry.spec.owner, entry.spec.id) for entry in entries]

    def delete_due(self, id: str) -> None:
        """Delete a session if it is still :meth:`due` now."""
        entry = self._cache.find(id)
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


def _info(entry: StoredSession) -> SessionInfo:
    made = {name: value for name, value in asdict(entry.spec).items() if name != "owner"}
    progress = entry.progress
    return SessionInfo(**made, sequence=progress.sequence, images=progress.images)
