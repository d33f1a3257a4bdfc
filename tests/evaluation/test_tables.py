"""Tables as text."""

import csv
import io

import pytest

from cliquetta.evaluation.tables import TextTable, to_csv, to_latex, to_markdown

TABLE = TextTable(("method", "a|b"), (("zero_shot", "83.5 ± 0.4▲"),), title="top-1 %")


def test_markdown_and_latex_escape_their_signs() -> None:
    assert to_markdown(TABLE).splitlines() == [
        *("**top-1 %**", ""),
        "| method | a\\|b |",
        "| --- | ---: |",
        "| zero_shot | 83.5 ± 0.4▲ |",
    ]
    latex = to_latex(TABLE)
    assert r"zero\_shot & 83.5 $\pm$ 0.4$\blacktriangle$ \\" in latex
    assert r"\begin{tabular}{lr}" in latex


def test_csv_reads_back_and_every_row_has_all_cells() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(["a", "b", "c"], [["x,y", None, 1.5]]))))
    assert rows == [["a", "b", "c"], ["x,y", "", "1.5"]]
    with pytest.raises(ValueError, match="2 columns"):
        TextTable(("a", "b"), (("x",),))
