"""The progress of a grid's runs on a cluster; a module of its own, so that actors start fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunReport:
    """Progress of a run on another machine."""

    number: int
    """Batches done."""
    batches: int
    images: int
    accuracy: float | None
    """Top-1 so far in percent, ``None`` without labels."""


class ProgressBoard:
    """The latest report of every run, by the run's number in the grid; lives in an actor."""

    def __init__(self) -> None:
        self.reports: dict[int, RunReport] = {}

    def post(self, run: int, report: RunReport) -> None:
        """Put up a report in the place of the last."""
        self.reports[run] = report

    def take(self) -> dict[int, RunReport]:
        """Return the reports since the last call."""
        reports, self.reports = self.reports, {}
        return reports
