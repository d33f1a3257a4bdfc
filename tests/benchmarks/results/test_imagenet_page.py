"""The page of ImageNet: tables of runs made by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results.imagenet_page import (
    OFFICIAL,
    PARTS,
    corruption_table,
    imagenet_page,
    scap_part,
    scap_single_view,
    scap_table,
)
from cliquetta.evaluation.record import Record, load_record
from tests._helpers.made_runs import ADAPTED, LABELS, PLAIN, make_run, table_cells

CLEAN = "tar:{root}/tar/imagenet"
REPORT = "tar:{root}/tar/imagenet-report"


def made(root: Path, method: str, dataset: str, top1: float, **changes: Any) -> Record:
    """A record whose accuracy is stated."""
    record = load_record(
        make_run(root, method, LABELS, PLAIN, dataset=dataset, batch_size=64)
    )
    return replace(record, metrics={"top1": top1, **changes})


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    accuracies = {
        "zero_shot": {"": 66.0, "@fog:5": 40.0, "@snow:5": 30.0},
        "tda": {"": 66.5, "@fog:5": 41.0, "@snow:5": 35.0},
        "tent": {"": 60.0, "@fog:5": 60.0},
    }
    return [
        made(tmp_path, method, f"{CLEAN}{shift}", top1)
        for method, by_shift in accuracies.items()
        for shift, top1 in by_shift.items()
    ]


def test_methods_are_ranked_over_corruptions_that_all_of_them_have(
    records: list[Record],
) -> None:
    table = corruption_table(records)
    assert table_cells(table, "zero_shot") == ["–", "35.00", "66.0", "30.0", "40.0"]
    assert table_cells(table, "tda") == ["+3.00", "38.00", "66.5", "35.0", "41.0"]
    assert table_cells(table, "tent") == [
        "+20.00",
        "60.00 (1 of 2)",
        "60.0",
        "–",
        "60.0",
    ]
    order = [line.split("`")[1] for line in table.splitlines() if "`" in line]
    assert order == ["zero_shot", "tda", "tent"], "one corruption of two is not ranked"


def scap(
    root: Path, top1: float, *, preset: str, dataset: str, **config: Any
) -> Record:
    usual = {"view_zoom": 410 / 224, "threshold": 0.8, "retention": True}
    folder = make_run(
        root, "scap", LABELS, ADAPTED, dataset=dataset, config=usual | config
    )
    record = load_record(folder)
    return replace(limited(record), preset=preset, metrics={"top1": top1})


def limited(record: Record) -> Record:
    stream = {**record.settings["stream"], "limit": 512}
    return replace(record, settings={**record.settings, "stream": stream})


def test_scaps_parts_are_told_apart_and_compared_with_the_row_above(
    tmp_path: Path,
) -> None:
    fog = f"{REPORT}@fog:5"
    zoom = {"view_zoom": 1.142857}
    runs = [
        scap(
            tmp_path,
            45.0,
            preset="paper-views",
            dataset=fog,
            **zoom,
            threshold=2.0,
            retention=False,
        ),
        scap(
            tmp_path, 45.5, preset="paper-views", dataset=fog, **zoom, retention=False
        ),
        scap(tmp_path, 45.4, preset="paper-views", dataset=fog, **zoom),
        scap(tmp_path, 38.0, preset="paper-views", dataset=fog),
        scap(tmp_path, 37.0, preset="released", dataset=fog, threshold=0.65),
    ]
    assert [scap_part(run) for run in runs] == list(PARTS)
    plain = limited(made(tmp_path, "zero_shot", fog, 40.0))
    rows = [
        line.split("|")[2].strip()
        for line in scap_table([plain, *runs]).splitlines()[2:]
    ]
    assert rows == ["40.0", "+5.0", "+5.5 (+0.5)", "+5.4 (-0.1)", "-2.0", "-3.0"]


def test_one_view_is_summed_over_streams(tmp_path: Path) -> None:
    run = made(tmp_path, "scap", CLEAN, 66.0, repaired=3, broken=1)
    text = " ".join(scap_single_view([run]).split())
    assert (
        "over 8 images (1 streams): 3 predictions become right and 1 wrong, +25.00"
        in text
    )


def test_the_official_corruptions_are_fifteen() -> None:
    assert len(OFFICIAL) == 15


def test_a_page_without_records_says_so() -> None:
    names = ("corruptions", "scap", "recorded")
    marks = [
        f"<!-- {name}: python -m benchmarks.results leaderboard -->\n<!-- /{name} -->"
        for name in names
    ]
    assert imagenet_page("\n".join(marks), []).count("**Not recorded yet.**") == 3
