"""``cliquetta reproduce`` and ``cliquetta ablate`` with a tiny model on a few bundled images."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from cliquetta.cli.ablate import ablate as run_ablate
from cliquetta.cli.ablate import split_values
from cliquetta.cli.evaluate import evaluate
from cliquetta.evaluation.record import load_record, unpack_records
from cliquetta.report.results_pages import GRIDS, ResultsPages
from tests._helpers.running import Run


def test_an_unknown_page_names_the_nearest(run: Run) -> None:
    answer = run("reproduce", "headlin")
    assert answer.code == 2 and "did you mean 'headline'" in answer.text
    answer = run("reproduce", "ood")
    assert answer.code == 2 and "evaluate --grid ood" in answer.text


def test_methods_that_would_not_be_run_again_are_refused(run: Run, tmp_path: Path) -> None:
    ask = ("reproduce", "headline", "--results", tmp_path, "--again")
    assert "needs --run" in run(*ask, "tent").text
    answer = run(*ask, "tennt", "--run")
    assert answer.code == 2 and "did you mean 'tent'" in answer.text


def test_a_page_is_not_rewritten_unasked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    monkeypatch.setattr(ResultsPages, "texts", lambda *_: {page: "from the records"})
    ask = ("reproduce", "headline", "--results", tmp_path)
    assert run(*ask).code == 0 and page.read_text() == "from the records"
    page.write_text("mine")
    answer = run(*ask)
    assert answer.code == 1 and "pass --overwrite" in answer.stderr and page.read_text() == "mine"
    assert run(*ask, "--overwrite").code == 0 and page.read_text() == "from the records"


def test_runs_that_are_recorded_are_not_run_again(
    run: Run, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRIDS, "methods", ("tiny",))
    monkeypatch.setattr(ResultsPages, "texts", lambda *_: {})
    block = {"datasets": ["bundled"], "methods": ["tda", "tent"], "model": str(tiny_file)}
    path, results = tmp_path / "tiny.json", tmp_path / "results"
    path.write_text(json.dumps([{**block, "limit": 20, "batch_size": 10}]))
    monkeypatch.setattr("cliquetta.evaluation.grid.packaged_grid", lambda _: path)
    results.mkdir()

    def record(out: str, *words: str) -> list[str]:
        ask = ("reproduce", "methods", "--run", "--results", results, "--out", tmp_path / out)
        assert run(*ask, *words).code == 0
        return sorted(
            load_record(file.parent).method for file in tmp_path.glob(f"{out}/*/record.json")
        )

    assert record("first") == ["tda", "tent", "zero_shot"]
    before = (results / "tiny.json").read_text()
    assert record("second") == [] and (results / "tiny.json").read_text() == before
    assert record("third", "--again", "tent") == ["tent"]
    assert len(unpack_records(results / "tiny.json")) == 3


def test_ablations_do_not_get_among_the_runs_that_are_compared() -> None:
    defaults = {f.__name__: signature(f).parameters["out"].default for f in (run_ablate, evaluate)}
    assert defaults == {"ablate": Path("ablations"), "evaluate": Path("runs")}


@pytest.fixture
def ablate(run: Run, tiny_file: Path, tmp_path: Path) -> Any:
    def call(*words: str | Path) -> Any:
        given = ("--model", tiny_file, "--limit", "20", "--batch-size", "10")
        return run("ablate", *given, "--out", tmp_path / "runs", *words)

    return call


TDA = ("--method", "tda", "--field", "positive_alpha", "--values", "1,2,4")


def test_an_ablation_is_a_table_a_curve_and_records(ablate: Any, tmp_path: Path) -> None:
    answer = ablate(*TDA, "--dataset", "bundled,bundled@fog:3", "--seeds", "0,1")
    assert answer.code == 0
    assert len(list((tmp_path / "runs").glob("*/record.json"))) == 2 * 2 * (1 + 3)
    (numbers,) = (tmp_path / "runs").glob("ablate-*.json")
    curves = json.loads(numbers.read_text())["curves"]
    assert [curve["dataset"] for curve in curves] == ["bundled", "bundled@fog:3"]
    for point in (point for curve in curves for point in curve["points"]):
        assert f"{point['top1']:.2f} ± {point['sd']:.2f}" in answer.text
        assert point["seeds"] == [0, 1]
    assert numbers.with_suffix(".png").exists()
    assert "default" in answer.text


def test_without_matplotlib_the_numbers_remain(
    ablate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cliquetta.report.style.can_draw", lambda: False)
    answer = ablate(*TDA, "--dataset", "bundled", "--json")
    assert answer.code == 0
    assert json.loads(answer.stdout)["curves"][0]["field"] == "positive_alpha"
    assert not list((tmp_path / "runs").glob("*.png"))
    assert list((tmp_path / "runs").glob("*.json"))
    assert "pip install cliquetta[report]" in ablate(*TDA, "--dataset", "bundled").text


def test_bad_ablations_end_before_the_first_run(ablate: Any, tmp_path: Path) -> None:
    scap = ("--method", "scap")
    for words, text in (
        (("--field", "threshold", "--values", "1", "--dataset", "bundled"), "of domain_norm"),
        ((*scap, "--field", "treshold", "--values", "1", "--dataset", "bundled"), "'threshold'"),
        (
            (*scap, "--field", "threshold", "--values", "a", "--dataset", "bundled"),
            "scap.threshold",
        ),
        ((*scap, "--field", "threshold", "--values", "0.5", "--dataset", "bundeld"), "'bundled'"),
        ((*scap, "--field", "threshold", "--values", " , ", "--dataset", "bundled"), "no values"),
    ):
        answer = ablate(*words)
        assert answer.code == 2 and text in answer.text
    assert not (tmp_path / "runs").exists()
    assert split_values("0;0,1") == ["0", "0,1"] and split_values("1, 2") == ["1", "2"]
