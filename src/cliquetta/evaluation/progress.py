"""Progress of a run: the step that observers get, and the counters saved with the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from torch import Tensor

from cliquetta.data.prepared import AnyBatch
from cliquetta.data.stream import Skipped
from cliquetta.types import Prediction


@dataclass(frozen=True)
class Step:
    """One batch done, for progress bars and reports."""

    number: int
    """Batches done, this one included."""
    batches: int
    images: int
    """Images done."""
    batch: AnyBatch
    labels: Tensor
    prediction: Prediction
    score: Callable[[], float | None]

    @property
    def accuracy(self) -> float | None:
        """Top-1 so far in percent, ``None`` without labels; everything so far is then on disk."""
        return self.score()


def now() -> str:
    """The time in UTC, as records write it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass
class RunProgress:
    """Counters of a run; all of them are saved with the method's memory."""

    batches: int = 0
    images: int = 0
    seconds: float = 0.0
    """Spent predicting."""
    timed: tuple[int, float] = (0, 0.0)
    """Images and seconds without the first batch of a process, in which kernels are chosen."""
    recalled: int = 0
    """Images that the prediction cache knew."""
    written: int = 0
    """Length of the prediction file in bytes."""
    resumed: int = 0
    started: str = field(default_factory=now)
    skipped: tuple[Skipped, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Plain values of the last prediction's evidence."""

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> RunProgress:
        """Counters as they were saved."""
        skipped = tuple(Skipped(**entry) for entry in notes["skipped"])
        return cls(**{**notes, "skipped": skipped})

    @property
    def images_per_second(self) -> float:
        """Throughput, without the first batch where there are others."""
        images, seconds = self.timed if self.timed[0] else (self.images, self.seconds)
        return images / seconds if seconds else 0.0
