"""Records made by hand, and the program that writes pages from records."""

from pathlib import Path

import pytest

from benchmarks.results.__main__ import app
from cliquetta.evaluation.record import Record
from tests._helpers.made_runs import make_records
from tests._helpers.running import Run, runner_of


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    """Zero-shot and two methods on three datasets with two seeds."""
    return make_records(tmp_path)


@pytest.fixture
def write() -> Run:
    """Run ``python -m benchmarks.results`` with these words."""
    return runner_of(app)
