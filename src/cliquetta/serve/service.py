"""The service without HTTP: sessions, the workers that serve them, and the numbers about both."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch

from cliquetta.errors import UserError
from cliquetta.methods.registry import MethodEntry
from cliquetta.model.clip import CLIP
from cliquetta.serve.auth import Tokens
from cliquetta.serve.factory import served_methods
from cliquetta.serve.limits import ByteBudget, Limits
from cliquetta.serve.metrics import Metrics
from cliquetta.serve.scheduler import FairPool
from cliquetta.serve.sessions import Sessions
from cliquetta.serve.store import Store

T = TypeVar("T")

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


def own_version() -> str:
    """The version of the package; ``unknown`` where it runs from its sources uninstalled."""
    try:
        return version("cliquetta")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Settings:
    """What the operator decides; clients can change none of it."""

    models: Mapping[str, CLIP]
    """By the names that clients use; the first is the default. All sessions share them."""
    methods: Mapping[str, MethodEntry] = field(default_factory=served_methods)
    """Those that sessions may use."""
    tokens: Tokens | None = None
    """Who is let in; everybody if ``None``."""
    hosts: frozenset[str] | None = LOCAL_HOSTS
    """Names in the ``Host`` header that are answered; any if ``None``, which needs tokens."""
    limits: Limits = field(default_factory=Limits)
    """What clients may ask for."""
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Sessions that are worked on at one time."""
    threads: int = 1
    """Threads of one computation."""

    def __post_init__(self) -> None:
        """Check the values at the door."""
        if not self.models:
            raise UserError("no models to serve: name at least one, such as micro")
        if self.tokens is None and self.hosts is None:
            raise UserError("a server without tokens answers to local names only: set hosts")


class Service:
    """Everything behind the routes."""

    def __init__(self, store: Store, settings: Settings) -> None:
        limits = settings.limits
        self.settings = settings
        self.limits = limits
        self.metrics = Metrics()
        self.budget = ByteBudget(limits.queued_bytes)
        self.sessions = Sessions(settings.models, settings.methods, store, limits, self.metrics)
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
            ("cliquetta_queue", "Requests that wait or are worked on.", lambda: self.pool.count),
            ("cliquetta_body_bytes", "Of bodies in memory.", lambda: self.budget.used),
        ):
            self.metrics.watch(name, text, value)

    async def run(self, session: str, work: Callable[[], T]) -> T:
        """The result of ``work`` when the session's turn has come; others are served meanwhile."""
        return await asyncio.wrap_future(self.pool.submit(session, work))

    def close(self) -> None:
        """Finish what was begun."""
        self.pool.close()
