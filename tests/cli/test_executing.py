"""Where ``cliquetta evaluate`` runs its grid: on features encoded once."""

import json
from pathlib import Path

import pytest
from rich.progress import Progress

from cliquetta.cli.console import Bars, Terminal
from cliquetta.cli.executing import GridBars
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.progress import RunReport
from cliquetta.evaluation.record import list_records
from cliquetta.evaluation.sweep import RunResult
from tests._helpers.running import Run
from tests._helpers.tolerance import LOGIT


def test_features_are_encoded_once_and_change_nothing(
    run: Run, tiny_file: Path, tmp_path: Path
) -> None:
    def scores(out: str, *more: object) -> dict[str, float]:
        words = (
            "--dataset",
            "bundled",
            "--method",
            "tda,scap",
            "--model",
            tiny_file,
            "--json",
        )
        small = ("--limit", "40", "--batch-size", "16", "--out", tmp_path / out)
        runs = json.loads(run("evaluate", *words, *small, *more).stdout)
        return {run["method"]: run["metrics"]["nll"] for run in runs}

    cached = ("--features", tmp_path / "features")
    assert scores("first", *cached) == pytest.approx(scores("pixels"), abs=LOGIT)
    (table,) = (tmp_path / "features").glob(
        "*/features.npy"
    )  # shared by zero_shot and TDA
    written = table.stat().st_mtime_ns
    scores("second", *cached, "--seeds", "1")
    assert table.stat().st_mtime_ns == written
    how = {
        r.method: r.environment["features"] for r in list_records(tmp_path / "second")
    }
    assert how == {"zero_shot": "kept", "tda": "kept", "scap": "encoded"}


def test_bars_come_and_go_with_what_is_under_way() -> None:
    progress = Progress(disable=True)
    bars = GridBars(Bars(progress), 2, Terminal(quiet=True))
    one, two = (RunSpec("bundled", "tda", seed=seed) for seed in (0, 1))
    bars.show("encode bundled", 5, 10)
    bars.show("encode bundled", 10, 10)
    bars.step(one, RunReport(1, 4, 16, None))
    bars.step(two, RunReport(2, 4, 32, 50.0))
    shown = {task.description: (task.completed, task.total) for task in progress.tasks}
    assert shown == {"runs": (0, 2), str(one): (1, 4), str(two): (2, 4)}
    bars.ended(RunResult(one, error="gone"))
    bars.step(one, RunReport(4, 4, 64, None))  # a report that was late
    assert [task.description for task in progress.tasks] == ["runs", str(two)]
    assert progress.tasks[0].completed == 1
