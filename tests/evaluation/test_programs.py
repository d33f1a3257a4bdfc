"""Programs of ``benchmarks/``: authors' code, shapes against textures."""

from pathlib import Path

import pytest

pytest.importorskip("yaml")

from benchmarks.authors.__main__ import BEGIN, END, main, write_table
from benchmarks.authors.support import Row
from benchmarks.shape_bias import cues, shares


def test_an_unknown_method_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--methods", "tda,tdb"])
    error = capsys.readouterr().err
    assert "no comparison of tdb" in error
    assert "onzeta" in error


def test_a_missing_tree_says_what_to_clone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{BEGIN}\n{END}\n\nBehind.\n", encoding="utf-8")
    assert main([str(tmp_path), "--methods", "tda", "--out", str(page)]) == 1
    assert "git clone https://github.com/kdiAAA/TDA" in capsys.readouterr().err
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Before.\n")
    assert text.endswith("Behind.\n")
    assert "no work tree of kdiAAA/TDA" in text


def test_a_new_run_replaces_its_methods_alone() -> None:
    page = f"Prose.\n{BEGIN}\n{END}\nMore.\n"
    first = write_table(
        page, {"mta": ["| `mta` | a |", "| | b |"], "tda": ["| `tda` | c |"]}
    )
    second = write_table(first, {"mta": ["| `mta` | d |"]})
    assert "| `mta` | d |" in second
    assert "| | b |" not in second
    assert "| `tda` | c |" in second
    assert second.startswith("Prose.\n")
    assert second.endswith("More.\n")
    assert second.index("`tda`") < second.index("`mta`")  # in the order of the program


def test_equal_means_predictions_and_differences() -> None:
    assert Row("", 4, 1e-6, 1.0, 1.0, 1e-4).equal
    assert not Row("", 4, 1e-3, 1.0, 1.0, 1e-4).equal
    assert not Row("", 4, 1e-6, 1.0, 0.75, 1e-4).equal


def test_shares_count_both_cues_of_file_names_and_the_bias_only_where_they_differ() -> (
    None
):
    assert cues("bear/bear1-clock12.png") == ("bear", "clock")
    with pytest.raises(ValueError, match="SHAPE1-TEXTURE2"):
        cues("bear/photo.png")
    result = [
        ("bear", "clock", "bear"),
        ("bear", "clock", "clock"),
        ("bear", "clock", "clock"),
        ("bear", "clock", "oven"),
        ("bear", "bear", "bear"),
    ]
    assert shares(result) == pytest.approx((40, 60, 80, 100 / 3))
