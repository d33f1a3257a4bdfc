"""What the service counts, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """All numbers of one service, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        r = self._registry
        self.requests = Counter(
            "cliquetta_requests", "Requests by route and status.", ["route", "status"], registry=r
        )
        self.request_seconds = Histogram(
            "cliquetta_request_seconds", "From first byte to answer.", ["route"], registry=r
        )
        self.wait_seconds = Histogram("cliquetta_wait_seconds", "In the queue.", registry=r)
        self.batch_seconds = Histogram(
            "cliquetta_batch_seconds",
            "Decoding, prediction and saving of a batch.",
            ["method"],
            registry=r,
        )
        self.images = Counter(
            "cliquetta_images", "Images predicted or refused.", ["result"], registry=r
        )
        self.replays = Counter("cliquetta_replays", "Batches answered from the store.", registry=r)
        self.evictions = Counter("cliquetta_evictions", "Sessions put out of memory.", registry=r)
        self.restores = Counter("cliquetta_restores", "Sessions read back from disk.", registry=r)
        self.store_errors = Counter("cliquetta_store_errors", "Disk errors.", registry=r)
        self.failures = Counter(
            "cliquetta_failures", "Batches that were not applied, by reason.", ["code"], registry=r
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a number that is read when somebody asks."""
        Gauge(name, text, registry=self._registry).set_function(value)

    def render(self) -> bytes:
        """All numbers as text."""
        data: bytes = generate_latest(self._registry)
        return data
