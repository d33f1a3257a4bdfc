"""Metrics of the service, in the format that Prometheus reads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from torch import Tensor

from cliquetta.types import Prediction

if TYPE_CHECKING:
    from cliquetta.serve.session_store import StoreSize

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_SCALARS = 64  # scalars of evidence that are shown; more would be a method gone wrong


class ServiceMetrics:
    """All metrics of one service, in a registry of their own. No label comes from a client."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._scalars: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        ours: dict[str, Any] = {"namespace": "cliquetta", "registry": self._registry}
        counter: Callable[..., Counter] = partial(Counter, **ours)
        histogram: Callable[..., Histogram] = partial(Histogram, **ours)
        self.requests = counter("requests", "Requests.", ["route", "status"])
        self.refusals = counter("refusals", "Refusals by code.", ["code"])
        self.request_seconds = histogram(
            "request_seconds",
            "From the head of a request to the end of its response.",
            ["route"],
        )
        self.wait_seconds = histogram("wait_seconds", "Time in the queue.")
        self.batch_seconds = histogram(
            "batch_seconds", "Decoding, prediction and saving of a batch.", ["method"]
        )
        self.images = counter("images", "Images predicted or refused.", ["result"])
        self.replays = counter("replays", "Repeated batches, responses from the store.")
        self.evictions = counter("evictions", "Sessions evicted from memory.")
        self.restores = counter("restores", "Sessions read back from disk.")
        self.written_bytes = counter(
            "written_bytes", "Memory and responses written by batches."
        )
        self.store_errors = counter("store_errors", "Errors of the database.")
        self._confidence = histogram(
            "confidence",
            "Mean top probability of a batch.",
            ["method"],
            buckets=_SHARES,
        )
        text = "Entropy of a batch's mean prediction by that of even classes; near 0: collapsed."
        self._evenness = histogram("evenness", text, ["method"], buckets=_SHARES)
        text = "Scalars of the last batch's evidence."
        self._evidence = Gauge("evidence", text, ["method", "name"], **ours)
        self._gauge: Callable[..., Gauge] = partial(Gauge, **ours)
        self._sessions = Gauge("sessions", "Sessions in the database.", **ours)
        self._database_bytes = Gauge(
            "database_bytes", "Size of the database on disk.", **ours
        )
        text = "Stored memory of the largest sessions."
        self._largest = Gauge("largest_session_bytes", text, ["rank"], **ours)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a number that is read when the metrics are."""
        self._gauge(name, text).set_function(value)

    def observe_size(self, size: StoreSize | None) -> None:
        """Set the sizes of the database; without them they are unknown."""
        self._largest.clear()
        if size is None:
            self._sessions.set(math.nan)
            self._database_bytes.set(math.nan)
            return
        self._sessions.set(size.sessions)
        self._database_bytes.set(size.bytes)
        for rank, number in enumerate(size.largest, start=1):
            self._largest.labels(str(rank)).set(number)

    def observe_health(self, method: str, prediction: Prediction) -> None:
        """Observe the health of adaptation: confidence, evenness, the method's own figures."""
        if not len(prediction.logits):
            return
        probabilities = prediction.probabilities.detach()
        confidence = probabilities.amax(dim=-1).mean()
        self._confidence.labels(method).observe(float(confidence))
        classes = probabilities.shape[1]
        if classes > 1:
            mean = probabilities.mean(dim=0)
            entropy = torch.special.entr(mean).sum()
            evenness = float(entropy) / math.log(classes)
            self._evenness.labels(method).observe(evenness)
        for name, value in _scalars(prediction.evidence).items():
            shown = (method, name)
            with self._lock:
                if len(self._scalars | {shown}) > _SCALARS:
                    continue
                self._scalars.add(shown)
            self._evidence.labels(method, name).set(value)

    def render(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self._registry)


def _scalars(evidence: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among evidence, and the means of what has one per image."""
    numbers = {}
    for name, value in evidence.items():
        number = _as_number(value)
        if math.isfinite(number):
            numbers[name] = number
    return numbers


def _as_number(value: Any) -> float:
    """A number, or the mean of a list of them; NaN for anything else."""
    if isinstance(value, Real):
        return float(value)
    if not isinstance(value, Tensor):
        return math.nan
    if value.ndim == 0:
        return float(value)
    if value.ndim > 1 or not value.is_floating_point():
        return math.nan
    return float(value.mean())  # NaN of an empty one
