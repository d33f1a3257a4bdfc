"""Progress of runs, here and on a cluster; imports nothing large, so that actors start fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from cliquetta.data.prepared import AnyBatch
    from cliquetta.types import Prediction


@dataclass(frozen=True)
class Step:
    """One batch done, for progress bars and reports."""

    number: int  # batches done, this one included
    batches: int
    images: int
    batch: AnyBatch
    labels: Tensor
    prediction: Prediction
    score: Callable[[], float | None]

    @property
    def accuracy(self) -> float | None:
        """Top-1 so far in percent, ``None`` without labels; everything so far is then on disk."""
        return self.score()


@dataclass(frozen=True)
class RunReport:
    """A step of a run on another machine: batches done and in all, images done, top-1 so far."""

    number: int
    batches: int
    images: int
    accuracy: float | None


class ProgressBoard:
    """The latest report of every run, by the run's number in the grid; lives in an actor."""

    def __init__(self) -> None:
        self.reports: dict[int, RunReport] = {}

    def post(self, run: int, report: RunReport) -> None:
        """Replace the last report of a run."""
        self.reports[run] = report

    def take(self) -> dict[int, RunReport]:
        """Return the reports since the last call."""
        reports = self.reports
        self.reports = {}
        return reports
