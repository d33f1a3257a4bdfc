"""Sections of a page: gains, comparisons, labels that are missing."""

import re
from pathlib import Path

from cliquetta.model.factory import MICRO_NOTE
from cliquetta.report.page import build_page
from cliquetta.report.runs import load_runs
from cliquetta.report.sections import headline
from tests._helpers.html_reader import Reader
from tests._helpers.made_runs import STREAM, make_run

LABELS, PLAIN, ADAPTED = STREAM


def test_runs_without_labels_are_reported_without_scores(tmp_path: Path) -> None:
    unknown = [-1] * len(LABELS)
    make_run(tmp_path, "zero_shot", unknown, PLAIN)
    make_run(tmp_path, "tent", unknown, ADAPTED)
    text = Reader(build_page(*load_runs([tmp_path])).html).text
    assert "tent changed 16 of 32 predictions; without labels" in text
    assert "Calibration" not in text


def test_several_runs_are_compared(tmp_path: Path) -> None:
    make_run(tmp_path, "zero_shot", LABELS, PLAIN)
    for method in ("tent", "tda", "dmn"):
        make_run(tmp_path, method, LABELS, ADAPTED)
    make_run(tmp_path, "scap", LABELS, LABELS)
    make_run(tmp_path, "scap", LABELS, PLAIN, status="running", seed=9)
    runs, unfinished = load_runs([tmp_path])
    page = build_page(runs, unfinished)
    text = Reader(page.html).text
    assert "5 methods on toy@fog:3" in text and "1 unfinished run left out" in text
    assert MICRO_NOTE in text
    assert text.count("tda") > 2
    assert "scap changed 12 of 32 predictions: 12 from wrong to right, 0 from right" in text
    assert "gain of 37.50 points (p = 0.00049)" in text  # 2 ** -11
    assert "tent changed 16 of 32 predictions: 4 from wrong to right, 8 from right to wrong" in text


def cards_of(folder: Path) -> list[tuple[str, str]]:
    html = headline(load_runs([folder])[0])
    return re.findall(r"<li><b>([^<]*)</b><span>([^<]*)</span>", html)


def test_figures_of_a_few_methods_head_the_page(tmp_path: Path) -> None:
    for shift in ("toy@fog:3", "toy@contrast:3"):
        make_run(tmp_path, "zero_shot", LABELS, PLAIN, dataset=shift)
        make_run(tmp_path, "scap", LABELS, LABELS, dataset=shift)
    alone = [("62.5 %", "right with zero_shot"), ("100.0 %", "right with scap")]
    assert cards_of(tmp_path) == [
        *alone,
        ("24", "of 64 predictions changed"),
        ("24", "from wrong to right"),
        ("0", "from right to wrong"),
    ]
    make_run(tmp_path, "tent", LABELS, ADAPTED, dataset="toy@fog:3")
    assert cards_of(tmp_path) == []  # tent did not see all images
    make_run(tmp_path, "tent", LABELS, ADAPTED, dataset="toy@contrast:3")
    assert cards_of(tmp_path) == [*alone, ("50.0 %", "right with tent")]
    text = Reader(headline(load_runs([tmp_path])[0])).text
    assert "scap changed 24 of 64 predictions: 24 from wrong to right" in text
    assert "tent changed 32 of 64 predictions: 8 from wrong to right, 16 from" in text


def test_all_seeds_count_in_the_figures_that_head_the_page(tmp_path: Path) -> None:
    for seed, predicted in enumerate((LABELS, PLAIN)):
        make_run(tmp_path, "zero_shot", LABELS, PLAIN, seed=seed)
        make_run(tmp_path, "scap", LABELS, predicted, seed=seed)
    right = sum(a == b for a, b in zip(LABELS, PLAIN, strict=True)) / len(LABELS)
    assert cards_of(tmp_path)[:2] == [
        (f"{100 * right:.1f} %", "right with zero_shot"),
        (f"{50 * (1 + right):.1f} %", "right with scap"),
    ]
    assert cards_of(tmp_path)[2][1] == f"of {2 * len(LABELS)} predictions changed"
