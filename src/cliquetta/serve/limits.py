"""Enforcement of limits: requests per second, bytes in memory, seconds of computation."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cliquetta.methods.building.allocation import TorchWatch
from cliquetta.serve.errors import ServiceError, too_large

_CLIENTS = 10_000


class RateLimiter:
    """A token bucket per client that refills with time; forgets the oldest clients."""

    def __init__(
        self, rate: float, burst: int, refusal: str = "too many requests; slow down"
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._refusal = refusal
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, client: str, cost: float = 1.0) -> None:
        """Count a request, or refuse it while the bucket holds less than 1 or its ``cost``."""
        now = time.monotonic()
        full = float(self._burst)
        needed = max(cost, 1.0)
        with self._lock:
            level, then = self._buckets.pop(client, (full, now))
            refilled = level + (now - then) * self._rate
            level = min(full, refilled)
            allowed = level >= needed
            left = level - cost if allowed else level
            self._buckets[client] = (left, now)
            if len(self._buckets) > _CLIENTS:
                self._buckets.popitem(last=False)
        if not allowed:
            after = (needed - level) / self._rate
            raise ServiceError(429, "rate_limited", self._refusal, retry_after=after)


class ByteBudget:
    """Bytes of requests and responses that are in memory at one time."""

    def __init__(self, total: int) -> None:
        self._total = total
        self.used = 0  # bytes reserved and not yet given back
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Reserve ``count`` bytes, or refuse at once."""
        with self._lock:
            if self.used + count > self._total:
                message = "too many large requests or responses at once"
                raise ServiceError(503, "overloaded", message, retry_after=1)
            self.used += count

    def give_back(self, count: int) -> None:
        """Return reserved bytes."""
        with self._lock:
            self.used -= count


class Deadline(TorchWatch):
    """Inside ``with Deadline(...):`` every torch function checks the time first."""

    # Python cannot stop a thread, but a batch ends so within one operation of its limit

    def __init__(self, seconds: float, remedy: str) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds
        self._message = (
            f"it took longer than {seconds:g} s and was not applied: {remedy}"
        )

    def check(self) -> None:
        """Refuse if the time is up."""
        if time.monotonic() > self._end:
            raise ServiceError(503, "out_of_time", self._message, retry_after=5)

    def before(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Check the time."""
        del func, args, kwargs
        self.check()


@contextmanager
def bounded(seconds: float, remedy: str) -> Iterator[Deadline]:
    """Compute within a time limit; running out of time or memory is a refusal with ``remedy``."""
    try:
        with Deadline(seconds, remedy) as deadline:
            yield deadline
    except (MemoryError, RuntimeError) as error:
        # torch has an error of its own for CUDA only
        words = ("out of memory", "allocate memory")
        if isinstance(error, MemoryError) or any(word in str(error) for word in words):
            raise too_large(f"not enough memory: {remedy}") from error
        raise
