"""Pieces of text of several pages."""

from pathlib import Path

import pytest

from benchmarks.results.texts import (
    as_item,
    figure,
    insert_between,
    linked,
    method_of,
    short_id,
    times,
)


def test_the_section_replaces_what_was_between_its_marks() -> None:
    start = "<!-- imagenet: python -m benchmarks.results published -->"
    page = f"before\n{start}\nold\n<!-- /imagenet -->\nafter"
    assert insert_between(page, "imagenet", "published", "new") == page.replace(
        "old", "new"
    )
    with pytest.raises(ValueError, match="needs a line"):
        insert_between("no marks", "imagenet", "published", "new")


def test_labels_of_rows_are_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "tda.md").touch()
    assert method_of("tda:imagenet-r batch_size=64") == "tda"
    assert linked("tda:pets", tmp_path) == "[`tda:pets`](tda.md)"
    assert linked("oga", tmp_path) == "`oga`"
    assert short_id("tar:{root}/tar/imagenet@fog:5") == "imagenet@fog:5"
    assert short_id("bundled@fog:3 with unknown junk") == "fog:3"


def test_figures_are_rounded_and_a_missing_one_is_a_dash() -> None:
    assert figure(None, ".1f") == times(None) == "–"
    assert figure(-0.04, "+.1f") == "+0.0", "no figure is -0.0"
    assert figure(1.25, ".2f") == "1.25"
    assert times(12.345) == "12.3 ×"


def test_items_are_indented_below_their_first_line() -> None:
    lines = as_item("word " * 40).splitlines()
    assert lines[0].startswith("- word")
    assert all(line.startswith("  word") for line in lines[1:])
    assert max(map(len, lines)) <= 100
