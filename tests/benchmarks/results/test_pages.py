"""README's table and the pages of results: numbers from records made by hand."""

from pathlib import Path

import pytest

from benchmarks.results.grid_files import GRIDS, grid_file
from benchmarks.results.pages import ResultsPages
from benchmarks.results.texts import insert_between
from cliquetta.errors import UserError
from cliquetta.evaluation.grid import ROOT, grid_roles, read_grid

REPOSITORY = Path(__file__).parents[3]


def test_the_grids_of_the_pages_can_be_read() -> None:
    for name in {name for names in GRIDS.values() for name in names}:
        specs = read_grid(grid_file(name), root="/data")
        assert {spec.method for spec in specs} > {"zero_shot"}
        roles = grid_roles(grid_file(name))
        with_role = {dataset.replace(ROOT, "/data") for dataset in roles}
        assert with_role == {spec.dataset for spec in specs}

    roles_used = list(grid_roles(grid_file("bundled")).values())
    assert [roles_used.count(r) for r in ("report", "dev", "clean")] == [22, 8, 1]


@pytest.mark.parametrize("page", GRIDS)
def test_pages_are_what_the_records_say(page: str, tmp_path: Path) -> None:
    """The table of README is made from a README without it."""
    docs = REPOSITORY / "docs"
    readme = REPOSITORY / "README.md"
    emptied = tmp_path / "README.md"
    text = readme.read_text(encoding="utf-8")
    without_table = insert_between(text, "headline", "headline", "")
    emptied.write_text(without_table, encoding="utf-8")
    pages = ResultsPages(docs / "results", emptied, docs / "methods/README.md")
    for path, text in pages.texts(page).items():
        file = readme if path == emptied else path
        known = file.read_text(encoding="utf-8")
        assert known == text, f"run `python -m benchmarks.results {page}`"


def test_without_records_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records"):
        ResultsPages(tmp_path, tmp_path, tmp_path).texts("headline")


@pytest.mark.parametrize("marker", ["<!-- headline: x -->", "<!-- /headline -->", ""])
def test_a_page_without_both_marks_is_refused(marker: str) -> None:
    with pytest.raises(ValueError, match="needs a line"):
        insert_between(marker, "headline", "headline", "a table")
