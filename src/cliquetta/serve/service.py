"""The service without HTTP: sessions, and worker threads that serve them in turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from cliquetta.errors import UserError
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.limits import ByteBudget
from cliquetta.serve.metrics import Metrics
from cliquetta.serve.sessions import Sessions
from cliquetta.serve.settings import Settings
from cliquetta.serve.store import Store

T = TypeVar("T")


class Service:
    """Everything behind the routes."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.settings = settings
        self.limits = limits = settings.limits
        self.metrics = Metrics()
        self.budget = ByteBudget(limits.queued_bytes)
        self.sessions = Sessions(settings, store, self.metrics)
        self.pool = FairPool(
            settings.workers,
            queued=limits.queued,
            queued_per_session=limits.queued_per_session,
            wait_seconds=limits.wait_seconds,
            prepare=partial(torch.set_num_threads, settings.threads),
        )
        for name, text, value in (
            ("cliquetta_sessions", "Sessions on disk.", lambda: self.sessions.count),
            ("cliquetta_resident_sessions", "In memory.", lambda: self.sessions.resident),
            ("cliquetta_queue", "Requests waiting or running.", lambda: self.pool.count),
            ("cliquetta_body_bytes", "Of bodies in memory.", lambda: self.budget.used),
        ):
            self.metrics.watch(name, text, value)

    async def run(self, session: str, work: Callable[[], T]) -> T:
        """The result of ``work`` when it is the session's turn; others are served meanwhile."""
        return await asyncio.wrap_future(self.pool.submit(session, work))

    def close(self) -> None:
        """Finish what was begun."""
        self.pool.close()


@dataclass(frozen=True)
class _Job:
    work: Callable[[], Any]
    future: Future[Any]
    since: float


class FairPool:
    """Worker threads that take one job of each session in turn.

    Jobs of one session run one after the other, in the order of :meth:`submit`; a session with
    many jobs waits for its next turn like all others. A job beyond the limits is refused at once.
    """

    def __init__(
        self,
        workers: int,
        *,
        queued: int,
        queued_per_session: int,
        wait_seconds: float,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Start ``workers`` threads; each calls ``prepare`` once before its first job."""
        if workers < 1:
            raise UserError(f"at least one worker, got {workers}")
        self._queued, self._per_session, self._wait = queued, queued_per_session, wait_seconds
        self._jobs: dict[str, deque[_Job]] = {}
        self._turns: deque[str] = deque()
        self._running: set[str] = set()
        self._count = 0
        self._mean = 0.1
        self._closed = False
        self._change = threading.Condition()
        self._threads = [
            threading.Thread(
                target=self._serve, args=(prepare,), name=f"cliquetta-worker-{i}", daemon=True
            )
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """Jobs that wait or run."""
        return self._count

    def submit(self, session: str, work: Callable[[], T]) -> Future[T]:
        """The future result of ``work``; refuses with 429 or 503 if too much waits already."""
        future: Future[T] = Future()
        with self._change:
            self.check_room(session)
            jobs = self._jobs.setdefault(session, deque())
            jobs.append(_Job(work, future, time.monotonic()))
            self._count += 1
            if len(jobs) == 1 and session not in self._running:
                self._turns.append(session)
                self._change.notify()
        return future

    def check_room(self, session: str) -> None:
        """Refuse if a job of ``session`` would be beyond the limits now."""
        if self._closed:
            raise ServiceError(503, "closing", "the server is shutting down", retry_after=5)
        waiting = len(self._jobs.get(session, ()))
        if waiting >= self._per_session:
            message = f"{waiting} requests of this session are waiting already"
            raise ServiceError(429, "session_busy", message, retry_after=self._mean * waiting)
        if self._count >= self._queued:
            after = self._mean * self._count / len(self._threads)
            raise ServiceError(503, "overloaded", "the server is busy", retry_after=after)

    def close(self) -> None:
        """Take no more jobs, finish those that wait, stop the threads."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self, prepare: Callable[[], None]) -> None:
        prepare()
        while True:
            with self._change:
                while not self._turns:
                    if self._closed and not self._count:
                        return
                    self._change.wait()
                session = self._turns.popleft()
                job = self._jobs[session].popleft()
                self._running.add(session)
            self._run(job)
            with self._change:
                self._running.discard(session)
                self._count -= 1
                if self._jobs[session]:
                    self._turns.append(session)
                    self._change.notify()
                else:
                    del self._jobs[session]
                if self._closed:
                    self._change.notify_all()

    def _run(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        start = time.monotonic()
        if start - job.since > self._wait:
            late = ServiceError(503, "overloaded", "waited too long in the queue", retry_after=5)
            job.future.set_exception(late)
            return
        try:
            result = job.work()
        except BaseException as error:  # whatever it is, it belongs to the caller
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        self._mean += 0.1 * (time.monotonic() - start - self._mean)
