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

    def call(
        *words: str | Path, method: str = "zero_shot", dataset: str = "bundled@fog:3"
    ) -> Any:
        given = (
            "--dataset",
            dataset,
            "--method",
            method,
            "--model",
            tiny_file,
            "--limit",
            "40",
        )
        return run(
            "evaluate", *given, "--batch-size", "16", "--out", tmp_path / "runs", *words
        )

    return call


def test_a_record_per_cell_of_the_grid_and_mean_spread_and_gain(evaluate: Any) -> None:
    grid = {"method": "tent", "dataset": "bundled,bundled@fog:3"}
    runs = json.loads(evaluate("--seeds", "0,1", "--json", **grid).stdout)
    cells = [(run["dataset"], run["method"], run["seed"]) for run in runs]
    assert cells == [
        (dataset, method, seed)
        for dataset in ("bundled", "bundled@fog:3")
        for method in ("zero_shot", "tent")
        for seed in (0, 1)
    ]
    for run in runs:
        folder = Path(run["record"]).parent
        record = load_record(folder)
        predictions = load_predictions(folder)
        assert record.status == "finished" and record.images == run["images"] == 40
        assert run["metrics"]["top1"] == pytest.approx(100 * predictions.correct.mean())
    result = evaluate("--seeds", "0,1", **grid)
    top1 = [run["metrics"]["top1"] for run in runs]
    assert f"{np.mean(top1[:2]):.2f} ± {np.std(top1[:2], ddof=1):.2f}" in result.text
    assert f"{np.mean(top1[2:4]) - np.mean(top1[:2]):+.2f}" in result.text
    assert "8 runs recorded" in result.text


def test_protocols_have_words_and_metrics_of_their_own(
    evaluate: Any, tmp_path: Path
) -> None:
    picture(tmp_path / "junk" / "a.png")
    (run,) = json.loads(
        evaluate("--unknown", f"folder:{tmp_path / 'junk'}", "--json").stdout
    )
    assert run["images"] == 41 and run["metrics"]["outside"] == 1
    words = ("--classes", "cat,dog,frog", "--unknown", "bundled@fog:3")
    (run,) = json.loads(evaluate(*words, "--json").stdout)
    assert (
        run["images"] == 80
        and run["metrics"]["labelled"] == run["metrics"]["outside"] == 40
    )
    table = evaluate(*words).text
    assert (
        "AUROC" in table
        and "FPR95" in table
        and f"{run['metrics']['fpr95']:.2f}" in table
    )
    tail = evaluate("--order", "long-tail", "--imbalance", "20")
    assert tail.code == 0 and "macro-F1" in tail.text
    (batches,) = json.loads(
        evaluate("--order", "keff", "--present", "1-4", "--json").stdout
    )
    assert batches["images"] == 32  # full batches only


def test_fitted_file_is_evaluated(
    run: Run, fitted: Path, tiny_file: Path, tmp_path: Path
) -> None:
    words = (
        "--fitted",
        fitted,
        "--model",
        tiny_file,
        "--limit",
        "20",
        "--out",
        tmp_path / "runs",
    )
    result = run("evaluate", "--dataset", "bundled", *words, "--json")
    assert [run["method"] for run in json.loads(result.stdout)] == [
        "zero_shot",
        "tip_adapter",
    ]


def test_unreadable_images_of_a_folder_are_counted(
    run: Run, photos: Path, tiny_file: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (photos / "more").rename(data / "more")
    photos.rename(data / "few")
    (data / "more" / "bad.jpg").write_bytes(b"")
    words = (
        "--dataset",
        f"folder:{data}",
        "--model",
        tiny_file,
        "--out",
        tmp_path / "runs",
    )
    result = run("evaluate", *words)
    assert result.code == 3 and "1 image could not be read" in result.text


def test_a_cell_that_fails_does_not_stop_the_others(
    evaluate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Tent, batch: Any) -> None:
        raise RuntimeError("a broken method")

    monkeypatch.setattr(Tent, "_predict", fail)
    result = evaluate("--json", method="tent,zero_shot")
    runs = {run["method"]: run for run in json.loads(result.stdout)}
    assert "a broken method" in runs["tent"]["error"]
    assert result.code == 1 and runs["zero_shot"]["images"] == 40


@pytest.mark.parametrize("words", [("--method", "tda"), ("--set", "tda.alpha=1")])
def test_a_grid_names_its_methods_itself(run: Run, words: tuple[str, str]) -> None:
    result = run("evaluate", "--grid", "components", *words)
    assert result.refuses("--grid names the methods"), result.text
