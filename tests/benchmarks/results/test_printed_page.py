"""Printed figures beside ours: pairs, standard errors and distances of runs made by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results.grid_files import grid_file
from benchmarks.results.printed_page import (
    DESCRIPTIONS,
    SINGLE,
    Printed,
    match,
    measure,
    printed_section,
    read_printed,
)
from cliquetta.evaluation.grid import read_grid
from cliquetta.evaluation.record import Record

RESULTS = Path(__file__).parents[3] / "docs/results"
TDA = Printed(
    method="tda",
    name="TDA",
    text=SINGLE,
    printed=69.5,
    baseline=66.5,
    views="1",
    source="a paper, table 1",
    why="Other texts.",
)


def run(
    method: str, top1: float, template: str = "a photo of a {}.", **metrics: Any
) -> Record:
    settings = {
        "dataset": "tar:{root}/tar/imagenet",
        "method": method,
        "config": {},
        "fitted": None,
        "seed": 0,
        "prompts": {"templates": [template]},
        "stream": {"limit": None},
    }
    return Record(
        f"{method}-{template}",
        settings,
        status="finished",
        environment={"device_name": "a GPU", "versions": {"torch": "2.11"}},
        metrics={"top1": top1, **metrics},
        images=5000,
        finished="2026-11-19T22:00:00+00:00",
    )


def test_errors_are_those_of_shares_and_of_paired_differences() -> None:
    """Of 5,000 images 300 are repaired and 200 broken: +2 points."""
    own = measure(run("tda", 68.0, repaired=300, broken=200))
    assert own.accuracy_error == pytest.approx(100 * math.sqrt(0.68 * 0.32 / 5000))
    assert own.gain == pytest.approx(2.0)
    differences = [1] * 300 + [-1] * 200 + [0] * 4500
    mean = sum(differences) / 5000
    variance = sum((value - mean) ** 2 for value in differences) / 5000
    assert own.gain_error == pytest.approx(100 * math.sqrt(variance / 5000))


def test_a_printed_figure_meets_the_run_with_its_texts() -> None:
    records = [
        run("tda", 68.0, repaired=300, broken=200),
        run(
            "tda",
            71.0,
            template="mean of GPT-3 descriptions of {}",
            repaired=90,
            broken=0,
        ),
    ]
    (single,) = match([TDA], records)
    (described,) = match([replace(TDA, text=DESCRIPTIONS)], records)
    assert (single.own.accuracy, described.own.accuracy) == (68.0, 71.0)
    # The paper gains 3.0, we 2.0 with an error of 0.45, and 1.8 with one of 0.19.
    assert single.distance == pytest.approx(-1.0 / 0.4463, rel=1e-3)
    assert described.distance == pytest.approx(-1.2 / 0.1880, rel=1e-3)


def test_a_difference_beyond_two_errors_is_bold_and_has_its_sentence() -> None:
    section = printed_section([TDA], [run("tda", 68.0, repaired=300, broken=200)])
    cells = "| TDA | single | 1 | 69.50 | +3.00 | 5,000 | 68.00 ± 0.66 | +2.00 ± 0.45 | **-2.2** |"
    assert cells in section
    assert "- TDA: a paper, table 1. Other texts." in section
    assert "Recorded 2026-11-19 on a GPU, torch 2.11: 1 runs." in section


def test_every_printed_figure_has_a_source_and_a_run_in_the_grid() -> None:
    specs = read_grid(grid_file("published-imagenet"), root="ROOT")
    runs = {(s.method, DESCRIPTIONS if s.templates else SINGLE) for s in specs}
    printed = read_printed(RESULTS / "printed-imagenet.json")
    assert all(entry.source for entry in printed)
    assert {(entry.method, entry.text) for entry in printed} <= runs
    assert len({entry.method for entry in printed if entry.printed is not None}) >= 10
