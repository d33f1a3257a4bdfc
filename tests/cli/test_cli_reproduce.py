"""``cliquetta reproduce`` and ``cliquetta ablate`` with a tiny model on a few bundled images."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cliquetta.cli.ablate import ablate as run_ablate
from cliquetta.cli.ablate import split_values
from cliquetta.cli.evaluate import evaluate
from cliquetta.report.results_pages import Pages
from tests._helpers.running import Run


@pytest.fixture
def reproduce(run: Run, tiny_file: Path, tmp_path: Path) -> Any:
    def call(table: str, *words: str | Path) -> Any:
        given = ("--model", tiny_file, "--limit", "12", "--batch-size", "12")
        return run("reproduce", table, *given, "--out", tmp_path / "runs", *words)

    return call


def test_components_beside_the_printed_numbers(reproduce: Any, run: Run, tmp_path: Path) -> None:
    answer = reproduce("components")
    assert answer.code == 0
    for text in ("60.98 P", "64.52 P", "image + retention", "+3.54"):
        assert text in answer.text
    assert "6 runs, 12 images each" in answer.text
    assert "not comparable with the paper: model tiny instead of CLIP ViT-B/16" in answer.text
    saved = json.loads((tmp_path / "runs" / "reproduce-components.json").read_text())
    assert [line["label"] for line in saved["lines"]][0::4] == ["none", "all"]
    assert all(f"({line['difference']:+.2f})" in answer.text for line in saved["lines"])
    assert not any(line["comparable"] for line in saved["lines"])
    records = sorted((tmp_path / "runs").glob("*/record.json"))
    times = [path.stat().st_mtime_ns for path in records]
    again = reproduce("components", "--json")
    assert json.loads(again.stdout) == saved
    assert [path.stat().st_mtime_ns for path in records] == times
    quiet = reproduce("components", "--quiet")
    assert "not comparable with the paper" in quiet.stderr and "(" in quiet.stdout
    assert run("compare", tmp_path / "runs").code == 0


def test_a_table_of_methods(reproduce: Any, tmp_path: Path) -> None:
    answer = reproduce("cross-domain", "--method", "zero_shot,tda,coop", "--shift", "fog:2")
    assert answer.code == 0
    assert "bundled@fog:2 instead of mean of 4 sets" in answer.text
    assert "CoOp: learns from labelled images first" in answer.text
    saved = json.loads((tmp_path / "runs" / "reproduce-cross-domain.json").read_text())
    ours = {line["label"]: line["ours"] for line in saved["lines"]}
    assert set(ours) == {"CLIP, one template", "CoOp", "TDA"}
    assert ours["CoOp"] is None and f"{ours['TDA']:.2f}" in answer.text


@pytest.mark.parametrize("table", ["hyperparameters", "batch-size"])
def test_figures_are_drawn_and_saved(
    reproduce: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    few = {"threshold": (0.8, 0.95), "concentration": (0.0, 1.0), "capacity": (2, 6)}
    few |= {"neighbours": (1, 3), "batch_size": (6, 12)}
    monkeypatch.setattr("cliquetta.evaluation.reproduce.VALUES", few)
    answer = reproduce(table)
    assert answer.code == 0
    assert "the paper:" in answer.text
    saved = json.loads((tmp_path / "runs" / f"reproduce-{table}.json").read_text())
    assert [len(curve["points"]) for curve in saved["curves"]] == [2] * len(saved["curves"])
    for curve in saved["curves"]:
        assert curve["default"] in [point["value"] for point in curve["points"]]
        for point in curve["points"]:
            assert f"{point['top1']:.2f}" in answer.text
    with Image.open(tmp_path / "runs" / f"reproduce-{table}.png") as picture:
        picture.verify()
    if table == "batch-size":
        assert set(saved["largest_clique"]) == {"6", "12"}
        assert [curve["modalities"] for curve in saved["curves"]] == ["both", "image", "text"]
        assert "batch_size, image prompts alone" in answer.text
        assert "largest clique" in answer.text
    else:
        # four curves share zero-shot and the run with default values
        assert len(list((tmp_path / "runs").glob("*/record.json"))) == 1 + 1 + 4


def test_what_cannot_be_run_is_refused(reproduce: Any, run: Run, tmp_path: Path) -> None:
    answer = reproduce("component")
    assert answer.code == 2 and "did you mean 'components'" in answer.text
    answer = reproduce("components", "--root", tmp_path)
    assert answer.code == 2 and "imagenet-a is not under" in answer.text
    answer = reproduce("batch-size", "--root", tmp_path)
    assert answer.code == 2 and "batch-size needs imagenet-a" in answer.text
    answer = reproduce("hyperparameters", "--method", "scap")
    assert answer.code == 2 and "leave out --method" in answer.text
    answer = reproduce("components", "--shard", "1/2")
    assert answer.code == 2 and "--shard and --overwrite are for headline" in answer.text


def test_a_page_is_not_rewritten_unasked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    monkeypatch.setattr(Pages, "texts", lambda *_: {page: "from the records"})
    ask = ("reproduce", "headline", "--results", tmp_path)
    assert run(*ask).code == 0 and page.read_text() == "from the records"
    page.write_text("mine")
    answer = run(*ask)
    assert answer.code == 1 and "pass --overwrite" in answer.stderr and page.read_text() == "mine"
    assert run(*ask, "--overwrite").code == 0 and page.read_text() == "from the records"


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
