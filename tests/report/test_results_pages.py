"""README's table and the pages of results: numbers from records made by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cliquetta.cli.reproduce import Pages
from cliquetta.evaluation.comparison import compare
from cliquetta.evaluation.record import Record, find_runs, load_record, pack_records, unpack_records
from cliquetta.evaluation.reproduce import GRIDS, grid_file
from cliquetta.evaluation.sweep import ROOT, grid_roles, read_grid
from cliquetta.report.results_pages import (
    BEGIN,
    END,
    ablation_page,
    headline,
    insert_headline,
    methods_page,
    read_settings,
)
from tests._helpers.made_runs import make_run

REPOSITORY = Path(__file__).parents[2]
LABELS = (0, 1, 2, 3) * 5
ROLES = {"toy@fog:3": "report", "toy@contrast:3": "dev", "toy": "clean"}


def answers(right: int) -> list[int]:
    return [label if at < right else (label + 1) % 4 for at, label in enumerate(LABELS)]


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    """Zero-shot and two methods on three datasets with two seeds; TDA takes twice the time."""
    right = {
        ("zero_shot", "toy@fog:3"): (10, 10),
        ("zero_shot", "toy@contrast:3"): (12, 12),
        ("zero_shot", "toy"): (18, 18),
        ("tda", "toy@fog:3"): (12, 14),
        ("tda", "toy@contrast:3"): (11, 11),
        ("tda", "toy"): (18, 18),
        ("tent", "toy@fog:3"): (9, 9),
        ("tent", "toy@contrast:3"): (8, 8),
        ("tent", "toy"): (16, 18),
    }
    found = []
    for (method, dataset), counts in right.items():
        for seed, count in enumerate(counts):
            folder = make_run(tmp_path, method, LABELS, answers(count), dataset=dataset, seed=seed)
            rate = {"images_per_second": 50.0 if method == "tda" else 100.0, "seconds": 1.0}
            about = {"device_name": "toaster", "versions": {"torch": "9.9"}}
            record = replace(load_record(folder), throughput=rate, environment=about)
            record.save(folder)
            found.append(record)
    return found


def cells(table: str, method: str) -> Sequence[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| `{method}`")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_headline_has_means_worst_clean_and_cost(records: list[Record]) -> None:
    settings = read_settings(records, ROLES)
    table = headline(settings, settings)
    assert cells(table, "zero_shot") == ["55.00", "–", "90.0", "50.00", "–", "90.0", "1 ×"]
    assert cells(table, "tda") == [
        *("60.00 (+5.00)", "-5.00", "+0.0"),  # of fog +15 and contrast -5
        *("65.00 (+15.00)", "+15.00", "+0.0", "2 ×"),  # dev is left out
    ]
    assert cells(table, "tent")[2] == "-5.0"
    assert "bundled set, 2 shifts" in table and "real tower, 1 shifts" in table
    alone = headline(settings, [])
    assert cells(alone, "tda") == ["60.00 (+5.00)", "-5.00", "+0.0", "2 ×"]


def test_the_table_goes_between_its_marks() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert insert_headline(text, "| new |") == f"before\n{BEGIN}\n| new |\n{END}\nafter\n"
    with pytest.raises(ValueError, match="needs a line"):
        insert_headline("no marks", "| new |")


def test_packed_records_are_small_and_say_the_same(records: list[Record], tmp_path: Path) -> None:
    path = tmp_path / "packed.json"
    path.write_text(pack_records(records), encoding="utf-8")
    assert unpack_records(path) == [
        replace(r, metrics={k: v for k, v in r.metrics.items() if k != "per_class"})
        for r in records
    ]
    runs = [run for run in find_runs([tmp_path])[0] if run.folder is not None]
    whole, packed = compare(runs), compare(find_runs([path])[0])
    for key, cell in whole.cells.items():
        assert (packed.cells[key].mean, packed.cells[key].gain) == (cell.mean, cell.gain)
        assert packed.cells[key].test is None
    assert whole.overall("tda").worst == (pytest.approx(-5.0), "toy@contrast:3")  # type: ignore[comparison-overlap]
    assert whole.overall("tda").cost == pytest.approx(2.0)


def test_pages_list_methods_streams_and_sources(records: list[Record], tmp_path: Path) -> None:
    settings = read_settings(records, ROLES)
    (tmp_path / "tda.md").touch()
    page = methods_page(settings, settings, settings, tmp_path)
    assert "[`tda`](tda.md)" in page
    assert "`tda` +5.00." not in page and "`tda` +5.00" in page
    assert "| fog:3 | contrast:3 (dev) | toy (clean) |" in page.replace("toy@", "")
    assert "2025-01-01, toaster, torch 9.9" in " ".join(page.split())
    assert "`scap_domain`" in page.partition("## What was not run")[2]
    assert "+5.00 ± 14.14" in ablation_page(settings)


def test_the_grids_of_the_package_can_be_read() -> None:
    for name in {name for names in GRIDS.values() for name in names}:
        specs = read_grid(grid_file(name), root="/data")
        assert {spec.method for spec in specs} > {"zero_shot"}
        roles = {id.replace(ROOT, "/data") for id in grid_roles(grid_file(name))}
        assert roles == {spec.dataset for spec in specs}
    roles = grid_roles(grid_file("bundled"))  # type: ignore[assignment]
    assert [list(roles.values()).count(r) for r in ("report", "dev", "clean")] == [22, 8, 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", GRIDS)
def test_pages_are_what_the_records_say(page: str) -> None:
    pages = Pages(
        REPOSITORY / "docs/results",
        REPOSITORY / "README.md",
        REPOSITORY / "docs/methods/README.md",
    )
    if not pages.records(GRIDS[page][0]).exists():
        pytest.skip(f"{page} has not been recorded yet")
    path, text = pages.text(page)
    assert path.read_text(encoding="utf-8") == text, f"run `cliquetta reproduce {page}`"


def test_the_readme_has_a_place_for_the_table() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert re.search(f"{re.escape(BEGIN)}\\n\\| method .*{re.escape(END)}", text, re.DOTALL)
