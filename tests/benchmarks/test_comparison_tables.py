"""Rows of the accuracy tables against means, spreads and p-values taken by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison.log import Log
from comparison.tables import markdown, sign_flip_p, summarise, with_fewer_images

from tests.benchmarks.made_cells import make_cell, make_cells


def row_of(method: str) -> dict:
    return summarise([cell for cell in make_cells() if cell["method"] == method])


def test_a_complete_row() -> None:
    row = row_of("tent")
    # noise 50, 52; fog 62, 56; clean apart
    assert row["mean"] == pytest.approx(55.0)
    assert row["sd"] == pytest.approx(2**0.5)  # 56 with seed 0, 54 with seed 1
    assert row["gain"] == pytest.approx(5.0)  # of 11 and -1
    assert row["gain_sd_over_sets"] == pytest.approx(72**0.5)
    assert row["gain_report"] == pytest.approx(-1.0)
    assert (row["worst"], row["worst_set"]) == (pytest.approx(-1.5), "clean")
    assert row["ece"] == pytest.approx(20.5)
    assert row["sets"]["fog:3"]["top1"] == pytest.approx(59.0)
    assert row["sets"]["fog:3"]["sd"] == pytest.approx(18**0.5)


def test_a_set_with_fewer_seeds_counts_as_much_as_another() -> None:
    row = row_of("tda")
    assert row["mean"] == pytest.approx((41.5 + 63) / 2)
    assert row["gain"] == pytest.approx((1.5 + 3) / 2)
    # Fog has one seed: its accuracy may not pass for a difference between seeds.
    assert row["sd"] == pytest.approx(0.5**0.5)


def test_fewer_images_are_told_from_smaller_sets() -> None:
    cells = make_cells()
    assert with_fewer_images(cells) == {"zero"}
    small = [make_cell(m, "small", 0, 50.0, 0.0, images=7) for m in ("zero_shot", "tent")]
    assert with_fewer_images([*cells, *small]) == {"zero"}
    table = markdown(cells, {"tpt": "too slow"})
    assert "| zero (incomplete) (50 images a set) | 52.50 ± 0.00 | +2.50 ± 2.12 |" in table
    assert "| tent | 55.00 ± 1.41 | +5.00 ± 8.49 | -1.00 | -1.50 |" in table
    assert "- not run: tpt: too slow" in table


def test_p_counts_sign_flips() -> None:
    assert sign_flip_p([1.0, 2.0, 3.0]) == pytest.approx(2 / 8)
    assert sign_flip_p([3.0, -1.0, 1.0]) == pytest.approx(6 / 8)  # of |±3±1±1| two are 1
    assert sign_flip_p([0.0, 0.0]) == 1.0
    row = summarise([make_cell("tent", f"set{i}", s, 50, 1 + i) for i in range(6) for s in (0, 1)])
    assert (row["p"], row["paired"]) == (pytest.approx(2 / 64), "6 sets")


def test_reasons_of_what_was_not_run_survive_a_restart(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.skipped.update({"coop": "needs text", "tent on fog:3": "out of memory"})
    log.add(make_cell("zero_shot", "fog:3", 0, 50.0, 0.0))
    log.tables()
    again = Log(tmp_path)
    assert again.skipped == {"coop": "needs text", "tent on fog:3": "out of memory"}
    again.add(make_cell("tent", "fog:3", 0, 55.0, 5.0))
    again.tables()
    assert Log(tmp_path).skipped == {"coop": "needs text"}
