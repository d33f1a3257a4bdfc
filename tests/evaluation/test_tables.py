"""Tables as text."""

import csv
import io

import pytest

from cliquetta.decimals import decimal
from cliquetta.evaluation.tables import TextTable, to_csv, to_latex, to_markdown

TABLE = TextTable(("method", "a|b"), (("zero_shot", "83.5 ± 0.4▲"),), title="top-1 %")


def test_markdown_and_latex_escape_their_signs() -> None:
    assert to_markdown(TABLE).splitlines() == [
        "**top-1 %**",
        "",
        "| method | a\\|b |",
        "| --- | ---: |",
        "| zero_shot | 83.5 ± 0.4▲ |",
    ]
    latex = to_latex(TABLE)
    assert r"zero\_shot & 83.5 $\pm$ 0.4$\blacktriangle$ \\" in latex
    assert r"\begin{tabular}{lr}" in latex


def test_csv_reads_back_and_every_row_has_all_cells() -> None:
    text = to_csv(["a", "b", "c"], [["x,y", None, 1.5]])
    header, row = csv.reader(io.StringIO(text))
    assert header == ["a", "b", "c"]
    assert row == ["x,y", "", "1.5"]


def test_a_row_that_lacks_a_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="2 columns"):
        TextTable(("a", "b"), (("x",),))


def test_figures_that_round_to_zero_have_no_minus_sign() -> None:
    assert decimal(-0.004) == "0.00"
    assert decimal(-0.04, 1, signed=True) == "+0.0"
    assert decimal(-0.006) == "-0.01"
    assert decimal(2.345, signed=True) == "+2.35"


def test_latex_prints_the_best_in_bold_and_knows_our_signs() -> None:
    table = TextTable(("a", "b"), (("x", "4 ×"), ("y", "5")), best=frozenset({(0, 1)}))
    latex = to_latex(table)
    assert r"x & \textbf{4 $\times$} \\" in latex
    assert r"y & 5 \\" in latex
