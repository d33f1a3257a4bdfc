"""The board of replicas' metrics for the router; a module of its own, so that it loads fast."""

from __future__ import annotations

import time

from prometheus_client.metrics_core import Metric

POST_SECONDS = 5.0


class Board:
    """The latest metrics of every replica; lives in an actor."""

    def __init__(self) -> None:
        self._posted: dict[str, tuple[float, list[Metric]]] = {}

    def post(self, replica: str, metrics: list[Metric]) -> None:
        """Replace the metrics of a replica."""
        self._posted[replica] = time.monotonic(), metrics

    def read(self) -> dict[str, list[Metric]]:
        """Metrics of the replicas that live."""
        oldest = time.monotonic() - 4 * POST_SECONDS
        return {name: metrics for name, (when, metrics) in self._posted.items() if when > oldest}
