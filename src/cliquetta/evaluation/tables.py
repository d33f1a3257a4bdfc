"""A table of text cells as Markdown, CSV or LaTeX."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from cliquetta.errors import UserError


@dataclass(frozen=True)
class TextTable:
    """Cells as they are printed; all columns but the first ``labels`` hold numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1
    title: str = ""
    best: frozenset[tuple[int, int]] = frozenset()
    """Row and column of the cells that LaTeX prints in bold."""

    def __post_init__(self) -> None:
        """Check that every row has a cell for every column."""
        for row in self.rows:
            if len(row) != len(self.columns):
                raise UserError(
                    f"{len(row)} cells for {len(self.columns)} columns: {row}"
                )


def to_markdown(table: TextTable) -> str:
    """Write a pipe table, numbers to the right."""
    lines = []
    if table.title:
        lines += [f"**{table.title}**", ""]
    lines.append(_pipes(table.columns))
    numbers = len(table.columns) - table.labels
    lines.append(_pipes(["---"] * table.labels + ["---:"] * numbers))
    lines += map(_pipes, table.rows)
    return "\n".join(lines) + "\n"


def _pipes(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def to_csv(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write comma-separated values with a header; ``None`` is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if cell is None else cell for cell in row])
    return text.getvalue()


_LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "±": r"$\pm$",
        "−": "$-$",
        "–": "--",
        "▲": r"$\blacktriangle$",
        "▼": r"$\blacktriangledown$",
        "→": r"$\to$",
        "×": r"$\times$",
        "φ": r"$\varphi$",
        "κ": r"$\kappa$",
        "°": r"$^\circ$",
        "λ": r"$\lambda$",
        "†": r"$\dagger$",
        "‡": r"$\ddagger$",
    }
)


def to_latex(table: TextTable) -> str:
    """Write a ``tabular`` for booktabs; the triangles need amssymb."""
    numbers = len(table.columns) - table.labels
    lines = [
        rf"\begin{{tabular}}{{{'l' * table.labels}{'r' * numbers}}}",
        r"\toprule",
        _ampersands(table.columns),
        r"\midrule",
        *(_latex_row(table, number) for number in range(len(table.rows))),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    heading = [f"% {table.title}"] if table.title else []
    return "\n".join([*heading, *lines]) + "\n"


def _latex_row(table: TextTable, number: int) -> str:
    """Write a row, its best cells in bold."""
    cells = []
    for column, cell in enumerate(table.rows[number]):
        text = cell.translate(_LATEX)
        if (number, column) in table.best:
            text = rf"\textbf{{{text}}}"
        cells.append(text)
    return " & ".join(cells) + r" \\"


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"
