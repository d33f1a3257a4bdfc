"""Predictions of an independent method, kept so that the seeds of a grid share one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cliquetta.methods.base import Adapter
from cliquetta.types import Batch, Prediction


class PredictionCache:
    """The predictions of an independent method, by image.

    Neither order nor batch changes such a prediction. That the seed does not either is checked on
    the first batch of every run, which is always computed; where it does, the cache is emptied.
    """

    def __init__(self) -> None:
        self.logits: dict[str, Tensor] = {}
        self.evidence: Mapping[str, Any] = {}
        self.rate = 0.0
        """Images/s of the last run that computed its predictions."""

    def predict(self, adapter: Adapter, batch: Batch, *, first: bool) -> tuple[Prediction, int]:
        """The prediction of a batch, and how many of its images came from the cache."""
        rows = [at for at, key in enumerate(batch.keys) if first or key not in self.logits]
        if rows:
            keys = tuple(batch.keys[row] for row in rows)
            views = None if batch.views is None else batch.views[rows]
            some = batch if len(rows) == len(batch) else Batch(batch.images[rows], keys, views)
            said = adapter.predict(some)
            logits, self.evidence = said.logits.cpu(), said.evidence
            for key, row in zip(keys, logits, strict=True):
                if not _agree(self.logits.get(key), row, adapter):
                    self.logits.clear()
            self.logits.update(zip(keys, logits, strict=True))
        return (
            Prediction(torch.stack([self.logits[key] for key in batch.keys]), self.evidence),
            len(batch) - len(rows),
        )


def _agree(before: Tensor | None, now: Tensor, adapter: Adapter) -> bool:
    """Whether logits are the old ones up to rounding."""
    share = 1e-3 if adapter.model.dtype == torch.float32 else 2e-2
    tolerance = share * float(adapter.model.scale)
    return before is None or torch.allclose(before, now, rtol=0, atol=tolerance)
