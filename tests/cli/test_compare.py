"""``cliquetta compare``: the same numbers in four forms, and refusals in one sentence."""

import csv
import io
import json
from pathlib import Path

import pytest

from tests._helpers.running import Run


def test_the_same_numbers_in_every_form(
    run: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """Runs of zero-shot and TDA with two seeds on two shifts."""
    runs = tmp_path / "runs"
    words = (
        "--model",
        tiny_file,
        "--limit",
        "24",
        "--batch-size",
        "12",
        "--seeds",
        "0,1",
    )
    data = ("--dataset", "bundled@fog:3,bundled@contrast:4", "--method", "tda:pets")
    assert run("evaluate", *data, *words, "--out", runs).code == 0
    cells = json.loads(run("compare", runs, "--json").stdout)
    assert {(c["dataset"], c["method"]) for c in cells} == {
        (d, m)
        for d in ("bundled@fog:3", "bundled@contrast:4")
        for m in ("zero_shot", "tda:pets")
    }
    shown = [f"{cell['mean']:.2f} ± {cell['sd']:.2f}" for cell in cells]
    for form in ("terminal", "markdown"):
        result = run("compare", runs, "--format", form)
        assert result.code == 0
        assert all(text in result.text for text in shown), result.text
        assert "over all datasets" in result.text and "tda:pets *" in result.text
        assert "* constants that the method's authors set" in result.text
    latex = run("compare", runs, "--format", "latex").stdout
    assert all(text.replace("±", r"$\pm$") in latex for text in shown)
    rows = list(
        csv.DictReader(io.StringIO(run("compare", runs, "--format", "csv").stdout))
    )
    assert [float(row["mean"]) for row in rows] == [cell["mean"] for cell in cells]
    assert [row["p"] for row in rows] == [
        "" if c["p"] is None else str(c["p"]) for c in cells
    ]
    half = (
        "--dataset",
        "bundled@fog:3",
        "--limit",
        "12",
        "--no-baseline",
        "--model",
        tiny_file,
    )
    assert run("evaluate", *half, "--method", "tda", "--out", runs).code == 0
    assert run("compare", runs).refuses("different images do not belong in one column")
    wide = run(
        "compare", runs, "--split", "--format", "markdown"
    ).text  # a terminal breaks lines
    assert "bundled@fog:3 #2" in wide


@pytest.fixture
def one_dataset(run: Run, tiny_file: Path, tmp_path: Path) -> Path:
    """Runs of three methods on one dataset, given in an order that is not alphabetical."""
    words = ("--model", tiny_file, "--limit", "16", "--batch-size", "8")
    data = ("--dataset", "bundled@fog:3", "--method", "transclip,dmn,bca")
    assert run("evaluate", *data, *words, "--out", tmp_path / "runs").code == 0
    return tmp_path / "runs"


def test_rows_keep_the_order_in_which_methods_were_given(
    run: Run, one_dataset: Path
) -> None:
    rows = run("compare", one_dataset, "--format", "csv").stdout.splitlines()[1:]
    assert [row.split(",")[1] for row in rows] == [
        "zero_shot",
        "transclip",
        "dmn",
        "bca",
    ]


def test_the_worst_dataset_is_named_where_there_are_several(
    run: Run, one_dataset: Path, tiny_file: Path
) -> None:
    assert "worst" not in run("compare", one_dataset).text
    words = ("--dataset", "bundled@frost:3", "--limit", "16", "--batch-size", "8")
    made = run(
        "evaluate",
        *words,
        "--method",
        "dmn",
        "--model",
        tiny_file,
        "--out",
        one_dataset,
    )
    assert made.code == 0
    assert "worst" in run("compare", one_dataset, "--split").text


def test_latex_has_no_raw_signs_and_the_best_in_bold(
    run: Run, one_dataset: Path
) -> None:
    latex = run("compare", one_dataset, "--format", "latex").stdout
    cells = json.loads(run("compare", one_dataset, "--json").stdout)
    best = max(cell["mean"] for cell in cells)
    main = latex.partition(r"\end{tabular}")[0]
    assert main.count(r"\textbf{") == 1 and rf"\textbf{{{best:.2f}" in main
    printed = [line for line in latex.splitlines() if not line.startswith("%")]
    assert "\n".join(printed).isascii()
