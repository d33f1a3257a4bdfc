"""Where the runs of a grid say how far they are; a module of its own that loads in no time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """How far a run on another machine is."""

    number: int
    """Batches done."""
    batches: int
    images: int
    accuracy: float | None
    """Top-1 so far in percent, ``None`` without labels."""


class Board:
    """The latest report of every run, by the run's number in the grid; lives in an actor."""

    def __init__(self) -> None:
        self.reports: dict[int, Report] = {}

    def post(self, run: int, report: Report) -> None:
        """Put up a report in the place of the last."""
        self.reports[run] = report

    def take(self) -> dict[int, Report]:
        """What is new."""
        reports, self.reports = self.reports, {}
        return reports
