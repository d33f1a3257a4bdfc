"""The service without HTTP: sessions, and worker threads that serve them in turn."""

import asyncio
import contextvars
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from cliquetta.errors import UserError
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.limits import ByteBudget
from cliquetta.serve.metrics import ServiceMetrics
from cliquetta.serve.session_store import OvertakenError, SessionStore
from cliquetta.serve.sessions import Sessions
from cliquetta.serve.settings import Limits, Settings

T = TypeVar("T")
_ATTEMPTS = 5


class Service:
    """Everything behind the routes."""

    def __init__(self, store: SessionStore, settings: Settings) -> None:
        if not settings.models:
            raise UserError("no models to serve: name at least one, such as micro")
        self.settings = settings
        self.limits = settings.limits
        self.metrics = ServiceMetrics()
        self.budget = ByteBudget(self.limits.queued_bytes)
        self.sessions = Sessions(settings, store, self.metrics)
        limits = self.limits
        if settings.tokens is None:  # all clients are one owner
            limits = replace(limits, queued_per_owner=limits.queued)
        self.pool = FairPool(
            settings.workers,
            limits,
            threads=settings.threads,
            on_wait=self.metrics.wait_seconds.observe,
        )
        watch = self.metrics.watch
        watch(
            "resident_sessions",
            "Sessions in memory.",
            lambda: len(self.sessions.residents),
        )
        watch(
            "free_bytes", "Free space on the disk of SQLite.", store.database.free_bytes
        )
        watch("queue", "Requests waiting or running.", lambda: self.pool.count)
        watch(
            "body_bytes", "Requests and responses in memory.", lambda: self.budget.used
        )

    def render_metrics(self) -> bytes:
        """All metrics as text; without those of the database where it does not respond."""
        try:
            self.metrics.observe_size(self.sessions.size())
        except ServiceError:
            self.metrics.observe_size(None)
        return self.metrics.render()

    async def run(self, owner: str, session: str, work: Callable[[], T]) -> T:
        """The result of ``work`` when it is the session's turn; others are served meanwhile."""
        tracing = self.settings.tracing
        context = contextvars.copy_context()
        waiting = tracing.start("queue", session=session)

        def take_turn() -> T:
            tracing.end(waiting)
            return context.run(
                self.attempt, work
            )  # below the request's span, in a worker's thread

        try:
            return await asyncio.wrap_future(
                self.pool.submit(owner, session, take_turn)
            )
        finally:
            tracing.end(waiting)

    def attempt(self, work: Callable[[], T]) -> T:
        """The result of ``work``, repeated if another replica was first to change its session."""
        for _ in range(_ATTEMPTS):
            with suppress(OvertakenError):
                return work()
        message = (
            "another replica works on this session: nothing was changed, try again"
        )
        raise ServiceError(503, "session_moved", message, retry_after=1)

    def sweep(self) -> None:
        """Delete sessions that are due, each when it is its turn; then give disk space back."""
        self.sessions.shrink()
        for owner, session in self.sessions.due():
            with suppress(ServiceError):  # busy: the next sweep will
                self.pool.submit(
                    owner, session, partial(self.sessions.delete_due, session)
                )


@dataclass(frozen=True)
class _Job:
    owner: str
    work: Callable[[], Any]
    future: Future[Any]
    since: float


class FairPool:
    """Worker threads that serve owners in turn, and the sessions of an owner in turn.

    Jobs of one session run one after the other, in their order; those beyond limits are
    refused.
    """

    def __init__(
        self,
        workers: int,
        limits: Limits,
        *,
        threads: int = 1,
        on_wait: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Start workers with ``threads`` each; ``on_wait`` gets the seconds in the queue."""
        if workers < 1:
            raise UserError(f"at least one worker, got {workers}")
        self._limits = limits
        self._on_wait = on_wait
        self._jobs: dict[str, deque[_Job]] = {}
        self._turns: OrderedDict[str, deque[str]] = OrderedDict()  # sessions by owner
        self._running: set[str] = set()
        self._owned: Counter[str] = Counter()  # jobs that wait or run
        self._mean = 0.1
        self._closed = False
        self._change = threading.Condition()
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(threads,),
                name=f"cliquetta-worker-{i}",
                daemon=True,
            )
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """Jobs that wait or run."""
        return self._owned.total()

    def submit(self, owner: str, session: str, work: Callable[[], T]) -> Future[T]:
        """The future result of ``work``; refuses with 429 or 503 if too much waits already."""
        future: Future[T] = Future()
        with self._change:
            self.check_room(owner, session)
            jobs = self._jobs.setdefault(session, deque())
            jobs.append(_Job(owner, work, future, time.monotonic()))
            self._owned[owner] += 1
            if len(jobs) == 1 and session not in self._running:
                self._line_up(owner, session)
        return future

    def _line_up(self, owner: str, session: str) -> None:
        self._turns.setdefault(owner, deque()).append(session)
        self._change.notify()

    def check_room(self, owner: str, session: str) -> None:
        """Refuse if a job of ``session`` would be beyond the limits now."""
        if self._closed:
            raise _closing()
        limits = self._limits
        waiting = len(self._jobs.get(session, ()))
        if waiting >= limits.queued_per_session:
            message = f"{waiting} requests of this session are waiting already"
            after = self._mean * waiting
            raise ServiceError(429, "session_busy", message, retry_after=after)
        seconds_of_job = self._mean / len(self._threads)
        if self.count >= limits.queued:
            after = seconds_of_job * self.count
            raise ServiceError(
                503, "overloaded", "the server is busy", retry_after=after
            )
        owned = self._owned[owner]
        if owned >= limits.queued_per_owner:
            message = f"{owned} requests of your sessions are waiting already"
            after = seconds_of_job * owned
            raise ServiceError(429, "owner_busy", message, retry_after=after)

    def close(self, seconds: float = 60.0) -> None:
        """Take no more jobs, finish those that wait, stop the threads.

        After so many ``seconds`` those that wait are refused, and those that run are
        left alone: until they are saved they have changed nothing.
        """
        end = time.monotonic() + seconds
        with self._change:
            self._closed = True
            self._change.notify_all()
            self._change.wait_for(lambda: not self.count, timeout=seconds)
            waiting = [job for jobs in self._jobs.values() for job in jobs]
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_closing())
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _serve(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while True:
            with self._change:
                while not self._turns:
                    if self._closed and not self.count:
                        return
                    self._change.wait()
                owner, sessions = self._turns.popitem(last=False)
                session = sessions.popleft()
                if sessions:
                    self._turns[owner] = sessions  # at the end: others first
                job = self._jobs[session].popleft()
                self._running.add(session)
            self._run(job)
            with self._change:
                self._running.discard(session)
                self._owned -= Counter([owner])
                if self._jobs[session]:
                    self._line_up(owner, session)
                else:
                    del self._jobs[session]
                if self._closed:
                    self._change.notify_all()

    def _run(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        start = time.monotonic()
        self._on_wait(start - job.since)
        if start - job.since > self._limits.wait_seconds:
            late = ServiceError(
                503, "overloaded", "waited too long in the queue", retry_after=5
            )
            job.future.set_exception(late)
            return
        try:
            result = job.work()
        except BaseException as error:  # whatever it is, it belongs to the caller
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        self._mean += 0.1 * (time.monotonic() - start - self._mean)


def _closing() -> ServiceError:
    return ServiceError(503, "closing", "the server is shutting down", retry_after=5)
