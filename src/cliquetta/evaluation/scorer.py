"""Scores predictions and logs them, several batches at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from cliquetta.evaluation.metrics import Metrics
from cliquetta.evaluation.predictions import PredictionLog

SCORE_SECONDS = 0.2
"""Batches wait this long, at most, to be scored and written together."""


class Scorer:
    """The metrics of a run and, where it has a folder, the file of its predictions."""

    def __init__(self, classes: int) -> None:
        self.metrics = Metrics(classes)
        self.log: PredictionLog | None = None
        self._waiting: list[tuple[Sequence[str], Tensor, Tensor]] = []
        self._flushed_at = time.monotonic()

    def add(self, keys: Sequence[str], labels: Tensor, logits: Tensor) -> None:
        """Take a batch; it is scored and written at once if the last time was long ago."""
        self._waiting.append((keys, labels, logits))
        if time.monotonic() - self._flushed_at >= SCORE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Score and write what is waiting."""
        if self._waiting:
            keys, labels, logits = zip(*self._waiting, strict=True)
            self._waiting = []
            known, scores = torch.cat(labels), torch.cat([part.cpu() for part in logits])
            self.metrics.update(scores, known, [len(part) for part in labels])
            if self.log is not None:
                self.log.append([key for part in keys for key in part], known, scores)
        self._flushed_at = time.monotonic()

    def accuracy(self) -> float | None:
        """Top-1 so far in percent."""
        self.flush()
        return self.metrics.accuracy
