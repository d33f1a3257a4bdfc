"""A grid on a local Ray cluster of two workers: the records of a serial one, whoever is killed."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cliquetta.evaluation.cluster import RayExecutor
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.predictions import PREDICTIONS
from cliquetta.evaluation.progress import RunReport, Step
from cliquetta.evaluation.record import Record, list_records
from cliquetta.evaluation.sweep import RunContext, RunResult, sweep
from tests._helpers.local_ray import local_ray
from tests._helpers.running import Run
from tests._helpers.running import run as run

pytestmark = pytest.mark.slow  # starts Ray


@dataclass
class PerilousContext(RunContext):
    """Kills its own process in the middle of TDA, and loses its disk in zero-shot; once each."""

    perils: Path | None = None  # folder in which each is noted before it happens

    def run(
        self, spec: RunSpec, on_step: Callable[[Step], None] | None = None
    ) -> Record:
        """The record of one cell, if nothing happens."""
        if spec.method == "zero_shot" and self.first_time("disk"):
            raise OSError("no such disk")

        def step(done: Step) -> None:
            if on_step is not None:
                on_step(done)
            if spec.method == "tda" and done.number == 130 and self.first_time("kill"):
                os.kill(os.getpid(), signal.SIGKILL)

        return super().run(spec, step)

    def first_time(self, name: str) -> bool:
        assert self.perils is not None
        note = self.perils / name
        there = note.exists()
        note.touch()
        return not there


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two workers on this machine; all tests here share them."""
    with local_ray(2):
        yield


@dataclass
class Grid:
    """Cells that are run in this process and on the cluster."""

    cells: list[RunSpec]
    folder: Path
    serial: list[RunResult]
    there: list[RunResult] = field(default_factory=list)
    reports: list[tuple[RunSpec, RunReport]] = field(default_factory=list)


@pytest.fixture(scope="module")
def grid(tiny_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """A grid on a cluster where one worker is killed in its run and another meets a bad disk."""
    folder = tmp_path_factory.mktemp("grid")
    model = str(tiny_file)
    cells = [
        RunSpec("bundled", "tda", model=model, batch_size=1, limit=160),
        RunSpec("bundled", "zero_shot", model=model, batch_size=16, limit=64),
        RunSpec("bundled", "scap", model=model, batch_size=16, limit=64, seed=1),
        RunSpec("bundlde", "zero_shot", model=model),
    ]
    serial = sweep(cells, RunContext(folder / "serial", device="cpu"))
    actual = Grid(cells, folder, serial)
    context = PerilousContext(folder / "ray", device="cpu", perils=folder)
    executor = RayExecutor(
        on_report=lambda spec, report: actual.reports.append((spec, report))
    )
    actual.there = sweep(cells, context, executor)
    return actual


def test_records_and_predictions_are_those_of_a_serial_grid(grid: Grid) -> None:
    for left, right in zip(grid.serial[:3], grid.there[:3], strict=True):
        assert right.error == ""
        assert left.record.settings == right.record.settings
        assert left.record.metrics == right.record.metrics
        name = f"{left.record.id}/{PREDICTIONS}"
        serial = (grid.folder / "serial" / name).read_bytes()
        assert (grid.folder / "ray" / name).read_bytes() == serial
    assert len(list_records(grid.folder / "ray")) == 3

    # both perils happened; the killed run continued from its last state
    assert (grid.folder / "kill").exists()
    assert (grid.folder / "disk").exists()
    records = [result.record for result in grid.there if result.record is not None]
    assert [record.resumed for record in records] == [1, 0, 0]


def test_a_bad_name_is_not_tried_again(grid: Grid) -> None:
    assert grid.there[3] == grid.serial[3]
    assert "did you mean 'bundled'" in grid.there[3].error


def test_all_runs_report_to_the_command(grid: Grid) -> None:
    last = dict(grid.reports)
    assert set(last) <= set(grid.cells[:3])
    for report in last.values():
        assert report.number <= report.batches
    assert last[grid.cells[0]].batches == 160


def test_the_command_runs_its_grid_there(run: Run, grid: Grid, tmp_path: Path) -> None:
    cell = grid.cells[1]
    ended = run(
        "evaluate",
        f"--dataset={cell.dataset}",
        f"--method={cell.method}",
        f"--model={cell.model}",
        "--limit=64",
        "--batch-size=16",
        "--device=cpu",
        f"--out={tmp_path}",
        "--ray=local",
        "--json",
    )
    (there,) = json.loads(ended.stdout)
    expected = dict(grid.serial[1].record.metrics)
    del expected["per_class"]
    assert there["metrics"] == expected


def test_retries_end(grid: Grid, tmp_path: Path) -> None:
    context = PerilousContext(
        tmp_path, device="cpu", perils=tmp_path / "no such folder"
    )
    (result,) = sweep(grid.cells[1:2], context, RayExecutor(retries=0))
    assert result.error.startswith("FileNotFoundError")


def test_what_the_cluster_cannot_give_is_refused(tmp_path: Path) -> None:
    spec = RunSpec("bundled", "zero_shot")
    with pytest.raises(ValueError, match="has 0"):
        sweep([spec], RunContext(tmp_path), RayExecutor(gpus=0.5))
    with pytest.raises(ValueError, match="--device"):
        sweep([spec], RunContext(tmp_path, device="cuda:1"), RayExecutor())
