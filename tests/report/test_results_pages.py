"""README's table and the pages of results: numbers from records made by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from cliquetta.errors import UserError
from cliquetta.evaluation.comparison import compare
from cliquetta.evaluation.grid import ROOT, grid_roles, packaged_grid, read_grid
from cliquetta.evaluation.record import Record, find_runs, pack_records, unpack_records
from cliquetta.report.results_pages import (
    BEGIN,
    END,
    GRIDS,
    ResultsPages,
    ablation_page,
    headline,
    insert_headline,
    read_settings,
)
from tests._helpers.made_runs import table_cells

REPOSITORY = Path(__file__).parents[2]


ROLES = {"toy@fog:3": "report", "toy@contrast:3": "dev", "toy": "clean"}


def test_the_headline_has_means_worst_clean_and_cost(records: list[Record]) -> None:
    settings = read_settings(records, ROLES)
    table = headline(settings, settings)
    assert table_cells(table, "zero_shot") == [
        "55.00",
        "–",
        "90.0",
        "50.00",
        "–",
        "90.0",
        "1 ×",
    ]
    assert table_cells(table, "tda") == [
        *("60.00 (+5.00)", "-5.00", "+0.0"),  # of fog +15 and contrast -5
        *("65.00 (+15.00)", "+15.00", "+0.0", "2 ×"),  # dev is left out
    ]
    assert table_cells(table, "tent")[2] == "-5.0"
    assert "| +5.00 |" in ablation_page(settings), "no interval of two datasets"
    assert "bundled set, 2 shifts" in table and "real tower, 1 shifts" in table
    alone = headline(settings, [])
    assert table_cells(alone, "tda") == ["60.00 (+5.00)", "-5.00", "+0.0", "2 ×"]


def test_packed_records_are_small_and_say_the_same(
    records: list[Record], tmp_path: Path
) -> None:
    path = tmp_path / "packed.json"
    path.write_text(pack_records(records), encoding="utf-8")
    assert unpack_records(path) == [
        replace(r, metrics={k: v for k, v in r.metrics.items() if k != "per_class"})
        for r in records
    ]
    runs = [run for run in find_runs([tmp_path])[0] if run.folder is not None]
    single, packed = compare(runs), compare(find_runs([path])[0])
    for key, cell in single.cells.items():
        assert (packed.cells[key].mean, packed.cells[key].gain) == (
            cell.mean,
            cell.gain,
        )
        assert packed.cells[key].test is None
    assert single.overall("tda").worst == (pytest.approx(-5.0), "toy@contrast:3")  # type: ignore[comparison-overlap]
    assert single.overall("tda").cost == pytest.approx(2.0)


def test_the_grids_of_the_package_can_be_read() -> None:
    for name in {name for names in GRIDS.values() for name in names}:
        specs = read_grid(packaged_grid(name), root="/data")
        assert {spec.method for spec in specs} > {"zero_shot"}
        roles = {id.replace(ROOT, "/data") for id in grid_roles(packaged_grid(name))}
        assert roles == {spec.dataset for spec in specs}
    roles_used = list(grid_roles(packaged_grid("bundled")).values())
    assert [roles_used.count(r) for r in ("report", "dev", "clean")] == [22, 8, 1]


@pytest.mark.parametrize("page", GRIDS)
def test_pages_are_what_the_records_say(page: str, tmp_path: Path) -> None:
    """The table of README is made from a README without it."""
    docs, readme, emptied = (
        REPOSITORY / "docs",
        REPOSITORY / "README.md",
        tmp_path / "README.md",
    )
    before, _, after = readme.read_text(encoding="utf-8").partition(BEGIN)
    emptied.write_text(
        f"{before}{BEGIN}\n{END}{after.partition(END)[2]}", encoding="utf-8"
    )
    pages = ResultsPages(docs / "results", emptied, docs / "methods/README.md")
    for path, text in pages.texts(page).items():
        known = (readme if path == emptied else path).read_text(encoding="utf-8")
        assert known == text, f"run `cliquetta reproduce {page}`"


def test_without_records_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records"):
        ResultsPages(tmp_path, tmp_path, tmp_path).texts("headline")


@pytest.mark.parametrize("text", [BEGIN, END, ""])
def test_a_readme_without_both_marks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="needs a line"):
        insert_headline(text, "a table")
