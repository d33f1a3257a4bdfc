"""Runs of several processes: one writes, all begin and end together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from cliquetta.evaluation import sweep as sweeping
from cliquetta.evaluation.distributed import Team, TeamExecutor, join_team, leave_team, team_size
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.record import Record, list_records
from cliquetta.evaluation.sweep import RunContext, RunResult, sweep
from tests._helpers.teamwork import in_processes
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tolerance import LOGIT

MODEL = build_tiny_clip()
CELLS = [
    RunSpec("bundled", "scap", model="tiny", limit=40, batch_size=16),
    RunSpec("bundled", "zero_shot", model="tiny", limit=40, batch_size=16),
    RunSpec("bundlde", "scap", model="tiny"),
    RunSpec("bundled", "scap", model="tiny", limit=40, batch_size=16, seed=1),
]


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model in the place of files; children inherit it."""
    monkeypatch.setattr(sweeping, "create_model", lambda name, **settings: MODEL)


def plain(record: Record) -> dict[str, float]:
    return {name: value for name, value in record.metrics.items() if name != "per_class"}


def run_grid(out: Path) -> list[RunResult]:
    assert team_size() == 2
    team, device = join_team("cpu")
    results = list(TeamExecutor(team).run(RunContext(out, device=device), CELLS))
    leave_team()
    return results


def test_a_grid_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    alone = sweep(CELLS, RunContext(tmp_path / "one"))
    first, second = in_processes(2, tmp_path, run_grid, tmp_path / "two")
    assert [result.spec for result in first] == CELLS
    assert [result.spec for result in second] == [CELLS[0], CELLS[2], CELLS[3]]
    assert first[2] == alone[2]
    assert len(list_records(tmp_path / "two")) == 3
    for ours, theirs in zip(first, alone, strict=True):
        if ours.record is None or theirs.record is None:
            assert ours.error == theirs.error
            continue
        assert ours.record.settings == theirs.record.settings
        assert plain(ours.record) == pytest.approx(plain(theirs.record), abs=LOGIT)


def fail_in_second(out: Path) -> str:
    team, _ = join_team("cpu")
    found = team.first_error("" if dist.get_rank() == 0 else "no memory")
    leave_team()
    return found


def test_an_error_of_one_is_known_to_all(tmp_path: Path) -> None:
    assert in_processes(2, tmp_path, fail_in_second, tmp_path) == ["no memory", "no memory"]


def test_without_torchrun_there_is_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert team_size() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")  # as some schedulers set it
    assert team_size() == 1
    assert Team(0, 1).is_main_process
    assert not Team(1, 2).is_main_process
