"""How much a client may ask for: sizes, counts, seconds and requests, all in one place."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.serve.errors import ServiceError

_MB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """What the service refuses to go beyond; every value can be set by the operator."""

    body_bytes: int = 32 * _MB
    """Of one request, counted while it arrives."""
    state_bytes: int = 256 * _MB
    """Of the memory of one session, and of a state that is imported."""
    images: int = 256
    """In one batch."""
    image_pixels: int = 25_000_000
    """Width times height of one image, read from its header before it is decoded."""
    view_bytes: int = 1024 * _MB
    """Of all augmented views of a batch, for the methods that ask for them."""
    classes: int = 2000
    """In the class list of a session."""
    class_length: int = 200
    """Characters of a class name or a template."""
    templates: int = 100
    """In the template list of a session."""
    sessions: int = 1000
    """Kept on disk, of all clients together."""
    sessions_per_owner: int = 200
    """Kept on disk, of one token (or of all clients of a server without tokens)."""
    resident_sessions: int = 64
    """Held in memory; the least recently used ones beyond it are on disk only."""
    resident_bytes: int = 1024 * _MB
    """Of the memories of the sessions held in memory; one session is always held."""
    batch_seconds: float = 60.0
    """Of work on one request, once it has begun; the session is then as it was before."""
    wait_seconds: float = 60.0
    """In the queue; what has waited longer is refused."""
    body_seconds: float = 60.0
    """For a request to arrive in full."""
    queued: int = 128
    """Requests that wait or are worked on, of all sessions."""
    queued_per_session: int = 8
    """Requests that wait, of one session."""
    queued_bytes: int = 256 * _MB
    """Of all request bodies in memory at one time."""
    replay: int = 4
    """Last answers kept with a session, for clients that repeat a batch."""
    rate: float = 50.0
    """Requests a second of one token, or of one address without tokens."""
    burst: int = 100
    """Requests that may come at once before ``rate`` counts."""

    def __post_init__(self) -> None:
        """Check the values at the door."""
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise UserError(f"limit {name} must be above 0, got {value}")

    @classmethod
    def from_text(cls, given: Mapping[str, str]) -> Limits:
        """Defaults with values as typed on a command line: ``{"images": "64"}``."""
        kinds = {name: type(value) for name, value in dataclasses.asdict(cls()).items()}
        values = {}
        for name, text in given.items():
            if name not in kinds:
                raise UnknownNameError("limit", name, kinds)
            try:
                values[name] = kinds[name](text)
            except ValueError:
                raise UserError(f"limit {name} is a number, {text!r} is not") from None
        return cls(**values)


class RateLimiter:
    """A bucket of requests per client that refills with time; forgets the oldest clients."""

    def __init__(
        self,
        rate: float,
        burst: int,
        *,
        clients: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._burst, self._clients, self._clock = rate, burst, clients, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, client: str) -> None:
        """Count one request of ``client``, or refuse it and say when to come back."""
        now = self._clock()
        with self._lock:
            level, then = self._buckets.pop(client, (float(self._burst), now))
            level = min(float(self._burst), level + (now - then) * self._rate)
            allowed = level >= 1
            self._buckets[client] = (level - 1 if allowed else level, now)
            if len(self._buckets) > self._clients:
                self._buckets.popitem(last=False)
        if not allowed:
            raise ServiceError(
                429,
                "rate_limited",
                f"more than {self._rate:g} requests a second; slow down",
                retry_after=(1 - level) / self._rate,
            )


class ByteBudget:
    """Bytes of request bodies that are in memory at one time."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes taken and not yet given back."""
        return self._used

    def take(self, count: int) -> None:
        """Reserve ``count`` bytes, or refuse at once."""
        with self._lock:
            if self._used + count > self._total:
                raise ServiceError(
                    503, "overloaded", "too many large requests at once", retry_after=1
                )
            self._used += count

    def give_back(self, count: int) -> None:
        """Return reserved bytes."""
        with self._lock:
            self._used -= count
