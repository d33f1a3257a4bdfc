"""Sections of a page: gains, comparisons, labels that are missing."""

import re
from pathlib import Path

from cliquetta.model.names import MICRO_NOTE
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
    assert (
        "scap changed 12 of 32 predictions: 12 from wrong to right, 0 from right"
        in text
    )
    assert "gain of 37.50 points (p = 0.00049)" in text  # 2 ** -11
    assert (
        "tent changed 16 of 32 predictions: 4 from wrong to right, 8 from right to wrong"
        in text
    )


def cards_of(folder: Path) -> list[tuple[str, str]]:
    html = headline(load_runs([folder])[0])
    return re.findall(r"<li><b>([^<]*)</b><span>([^<]*)</span>", html)


def test_figures_of_a_few_methods_over_all_seeds_head_the_page(tmp_path: Path) -> None:
    cells = (
        ("toy@fog:3", 0, LABELS),
        ("toy@fog:3", 1, PLAIN),
        ("toy@contrast:3", 0, LABELS),
    )
    for shift, seed, adapted in cells:
        make_run(tmp_path, "zero_shot", LABELS, PLAIN, dataset=shift, seed=seed)
        make_run(tmp_path, "scap", LABELS, adapted, dataset=shift, seed=seed)
    alone = [("62.5 %", "right with zero_shot"), ("87.5 %", "right with scap")]
    assert cards_of(tmp_path) == [
        *alone,
        ("24", "of 96 predictions changed"),
        ("24", "from wrong to right"),
        ("0", "from right to wrong"),
    ]
    for shift, seed, _ in cells[1:]:
        make_run(tmp_path, "tent", LABELS, ADAPTED, dataset=shift, seed=seed)
    assert cards_of(tmp_path) == []  # tent did not see all images
    make_run(tmp_path, "tent", LABELS, ADAPTED, dataset="toy@fog:3")
    assert cards_of(tmp_path) == [*alone, ("50.0 %", "right with tent")]
    text = Reader(headline(load_runs([tmp_path])[0])).text
    assert "scap changed 24 of 96 predictions: 24 from wrong to right" in text
    assert "tent changed 48 of 96 predictions: 12 from wrong to right, 24 from" in text
