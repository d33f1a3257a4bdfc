"""``cliquetta evaluate``: records, tables, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cliquetta.evaluation.predictions import load_predictions
from cliquetta.evaluation.record import load_record
from cliquetta.methods.tent import Tent
from tests._helpers.running import Run
from tests._helpers.trees import picture


@pytest.fixture
def evaluate(run: Run, tiny_file: Path, tmp_path: Path) -> Any:
    """``evaluate`` with the tiny model on 40 bundled images."""

    def call(*words: str | Path, method: str = "zero_shot", dataset: str = "bundled@fog:3") -> Any:
        given = ("--dataset", dataset, "--method", method, "--model", tiny_file, "--limit", "40")
        return run("evaluate", *given, "--batch-size", "16", "--out", tmp_path / "runs", *words)

    return call


def test_one_record_per_cell_of_the_grid(evaluate: Any, tmp_path: Path) -> None:
    result = evaluate("--seeds", "0,1", "--json", method="tent", dataset="bundled,bundled@fog:3")
    assert result.code == 0
    runs = json.loads(result.stdout)
    cells = [(run["dataset"], run["method"], run["seed"]) for run in runs]
    assert cells == [
        (dataset, method, seed)
        for dataset in ("bundled", "bundled@fog:3")
        for method in ("zero_shot", "tent")
        for seed in (0, 1)
    ]
    for run in runs:
        folder = Path(run["record"]).parent
        record, predictions = load_record(folder), load_predictions(folder)
        assert record.status == "finished" and record.images == run["images"] == 40
        assert run["metrics"]["top1"] == pytest.approx(100 * predictions.correct.mean())


def test_table_shows_mean_spread_and_gain(evaluate: Any) -> None:
    runs = json.loads(evaluate("--seeds", "0,1", "--json", method="tent").stdout)
    result = evaluate("--seeds", "0,1", method="tent")
    plain, tent = (
        [run["metrics"]["top1"] for run in runs if run["method"] == method]
        for method in ("zero_shot", "tent")
    )
    assert f"{np.mean(plain):.2f} ± {np.std(plain, ddof=1):.2f}" in result.text
    assert f"{np.mean(tent) - np.mean(plain):+.2f}" in result.text
    assert "4 runs recorded" in result.text


def test_protocols_have_words_and_metrics_of_their_own(evaluate: Any, tmp_path: Path) -> None:
    picture(tmp_path / "junk" / "a.png")
    (run,) = json.loads(evaluate("--unknown", f"folder:{tmp_path / 'junk'}", "--json").stdout)
    assert run["images"] == 41 and run["metrics"]["outside"] == 1
    words = ("--classes", "cat,dog,frog", "--unknown", "bundled@fog:3")
    (run,) = json.loads(evaluate(*words, "--json").stdout)
    assert run["images"] == 80 and run["metrics"]["labelled"] == run["metrics"]["outside"] == 40
    table = evaluate(*words).text
    assert "AUROC" in table and "FPR95" in table and f"{run['metrics']['fpr95']:.2f}" in table
    tail = evaluate("--order", "long-tail", "--imbalance", "20")
    assert tail.code == 0 and "macro-F1" in tail.text
    (batches,) = json.loads(evaluate("--order", "keff", "--present", "1-4", "--json").stdout)
    assert batches["images"] == 32  # whole batches only


def test_finished_runs_are_not_repeated(evaluate: Any, tmp_path: Path) -> None:
    evaluate()
    (record,) = (tmp_path / "runs").glob("*/record.json")
    before = record.stat().st_mtime_ns
    assert evaluate().code == 0 and record.stat().st_mtime_ns == before


def test_baseline_can_be_left_out(evaluate: Any) -> None:
    runs = json.loads(evaluate("--no-baseline", "--json", method="tent").stdout)
    assert [run["method"] for run in runs] == ["tent"]


def test_settings_reach_the_one_method(evaluate: Any) -> None:
    runs = json.loads(evaluate("--set", "temperature=2", "--json").stdout)
    record = load_record(Path(runs[0]["record"]).parent)
    assert record.settings["config"] == {"temperature": 2.0}


def test_fitted_file_is_evaluated(run: Run, fitted: Path, tiny_file: Path, tmp_path: Path) -> None:
    result = run(
        *("evaluate", "--dataset", "bundled", "--fitted", fitted, "--model", tiny_file),
        *("--limit", "20", "--out", tmp_path / "runs", "--json"),
    )
    assert result.code == 0
    assert [run["method"] for run in json.loads(result.stdout)] == ["zero_shot", "tip_adapter"]


def test_unreadable_images_of_a_folder_are_counted(
    run: Run, photos: Path, tiny_file: Path, tmp_path: Path
) -> None:
    for path in list(photos.glob("*.png")):
        (photos / "few").mkdir(exist_ok=True)
        path.rename(photos / "few" / path.name)
    (photos / "more" / "bad.jpg").write_bytes(b"")
    result = run(
        *("evaluate", "--dataset", f"folder:{photos}", "--model", tiny_file),
        *("--out", tmp_path / "runs"),
    )
    assert result.code == 3
    assert "1 image could not be read" in result.text


def test_a_cell_that_fails_does_not_stop_the_others(
    evaluate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Tent, batch: Any) -> None:
        raise RuntimeError("a broken method")

    monkeypatch.setattr(Tent, "_predict", fail)
    result = evaluate("--json", method="tent,zero_shot")
    runs = {run["method"]: run for run in json.loads(result.stdout)}
    assert result.code == 1
    assert "a broken method" in runs["tent"]["error"]
    assert runs["zero_shot"]["images"] == 40
