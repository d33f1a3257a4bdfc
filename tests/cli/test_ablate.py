"""``cliquetta ablate`` with a tiny model on a few bundled images."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cliquetta.cli.ablate import split_values
from cliquetta.evaluation.record import find_runs
from tests._helpers.running import Run


def test_ablations_do_not_get_among_the_runs_that_are_compared(
    run: Run, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both commands write where they do by default; the folder of runs holds no ablation."""
    monkeypatch.chdir(tmp_path)
    shared = ("--model", tiny_file, "--dataset", "bundled", "--limit", "10")
    varied = ("--field", "positive_alpha", "--values", "1")
    assert run("evaluate", "--method", "zero_shot", *shared).code == 0
    assert run("ablate", "--method", "tda", *varied, *shared).code == 0
    kept = {folder: find_runs([Path(folder)])[0] for folder in ("runs", "ablations")}
    methods = {
        folder: {entry.record.settings["method"] for entry in runs}
        for folder, runs in kept.items()
    }
    assert methods == {"runs": {"zero_shot"}, "ablations": {"zero_shot", "tda"}}


@pytest.fixture
def ablate(run: Run, tiny_file: Path, tmp_path: Path) -> Any:
    tda = (
        "--method",
        "tda",
        "--field",
        "positive_alpha",
        "--values",
        "1,2,4",
        "--limit",
        "20",
    )
    fixed = ("--model", tiny_file, "--batch-size", "10", "--out", tmp_path / "runs")
    return partial(run, "ablate", *tda, *fixed)


def test_an_ablation_is_a_table_a_curve_and_records(
    ablate: Any, tmp_path: Path
) -> None:
    result = ablate("--dataset", "bundled,bundled@fog:3", "--seeds", "0,1")
    assert len(list((tmp_path / "runs").glob("*/record.json"))) == 2 * 2 * (1 + 3)
    (numbers,) = (tmp_path / "runs").glob("ablate-*.json")
    curves = json.loads(numbers.read_text())["curves"]
    assert [curve["dataset"] for curve in curves] == ["bundled", "bundled@fog:3"]
    for point in (point for curve in curves for point in curve["points"]):
        assert f"{point['top1']:.2f} ± {point['sd']:.2f}" in result.text
        assert point["seeds"] == [0, 1]
    assert numbers.with_suffix(".png").exists()
    assert "default" in result.text


def test_without_matplotlib_the_numbers_remain(
    ablate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cliquetta.report.style.can_draw", lambda: False)
    result = ablate("--dataset", "bundled", "--json")
    assert json.loads(result.stdout)["curves"][0]["field"] == "positive_alpha"
    assert not list((tmp_path / "runs").glob("*.png"))
    assert list((tmp_path / "runs").glob("*.json"))
    assert "pip install cliquetta[report]" in ablate("--dataset", "bundled").text


def test_values_are_split_at_semicolons_if_there_are_any() -> None:
    assert split_values("0;0,1") == ["0", "0,1"] and split_values("1, 2") == ["1", "2"]
