"""``cliquetta compare``: recorded runs in one table, for the terminal or for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cliquetta.cli.command import Common, command
from cliquetta.cli.console import Terminal, count, number
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.evaluation.comparison import Cell, Comparison
    from cliquetta.evaluation.tables import TextTable

Format = Literal["terminal", "markdown", "csv", "latex"]
_TITLES = {
    "top1": "top-1 %",
    "top5": "top-5 %",
    "mean_class": "mean accuracy of classes %",
    "ece": "ECE %",
    "nll": "NLL",
}
_EXAMPLES = """
cliquetta compare runs

cliquetta compare runs --format latex > table.tex

cliquetta compare runs other/runs --baseline tda --metric ece

cliquetta compare runs --split --format csv > everything.csv
"""


def add_to(app: typer.Typer) -> None:
    """Enter the command."""
    command(app, "compare", examples=_EXAMPLES, compute=False)(compare)


def compare(
    common: Common,
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or of single ones.")],
    format: Annotated[
        Format, typer.Option(help="csv holds one line per method and data set, with everything.")
    ] = "terminal",
    baseline: Annotated[
        str, typer.Option(help="What the others are tested against; name:preset for a preset.")
    ] = "zero_shot",
    metric: Annotated[str, typer.Option(help="top1, top5, mean_class, ece or nll.")] = "top1",
    split: Annotated[
        bool,
        typer.Option("--split", help="Unlike runs of a data set get columns of their own."),
    ] = False,
) -> None:
    """Tabulate recorded runs: mean ± standard deviation over seeds, and a paired test.

    Runs with different preprocessing, templates, class names or images are not put into one
    column. ▲ and ▼ mark methods that answer better or worse than the baseline (p < 0.05, exact
    paired test over images, not corrected for the number of cells).
    """
    from cliquetta.evaluation.comparison import compare as tabulate
    from cliquetta.evaluation.record import find_runs

    finished, unfinished = find_runs(runs)
    if unfinished:
        common.terminal.warn(f"left out: {count(len(unfinished), 'unfinished run')}")
    if not finished:
        raise UserError("none of these runs is finished: give their command again to go on")
    table = tabulate(finished, baseline=baseline, metric=metric, split=split)
    present(table, common.terminal, format)


def present(table: Comparison, terminal: Terminal, format: Format = "terminal") -> None:
    """Write a comparison to stdout."""
    from cliquetta.evaluation.tables import to_csv, to_latex, to_markdown

    entries = [_plain(cell) for cell in table.cells.values()]
    terminal.document(entries)
    if terminal.json:
        return
    tables = [main_table(table), test_table(table)]
    if format == "csv":
        columns = list(entries[0])
        text = to_csv(columns, [[_flat(entry[c]) for c in columns] for entry in entries])
    elif format == "terminal":
        for shown in (t for t in tables if t.rows):
            right = shown.columns[shown.labels :]
            terminal.table(shown.columns, shown.rows, title=shown.title, right=right)
        for line in footnotes(table):
            terminal.say(line)
        return
    else:
        render = to_markdown if format == "markdown" else to_latex
        start = "" if format == "markdown" else "% "
        notes = "\n".join(start + line for line in footnotes(table))
        text = "\n".join([*(render(t) for t in tables if t.rows), notes]) + "\n"
    terminal.out.file.write(text)


def main_table(table: Comparison) -> TextTable:
    """Methods by data sets."""
    from cliquetta.evaluation.tables import TextTable

    several = len(table.columns) > 1
    rows = []
    for row in table.rows:
        cells = [table.cells.get((row, column)) for column in table.columns]
        shown = ["–" if cell is None else f"{spread(cell)}{cell.better}" for cell in cells]
        marks = "".join(dict.fromkeys(m for cell in cells if cell for m in cell.marks))
        average = [number(table.average(row))] if several else []
        rows.append((f"{row}{' ' if marks else ''}{marks}", *shown, *average))
    columns = ("method", *table.columns, *(["average"] if several else []))
    return TextTable(columns, tuple(rows), title=_TITLES[table.metric])


def test_table(table: Comparison) -> TextTable:
    """Every method against the baseline; answers that became right, and that became wrong."""
    from cliquetta.evaluation.tables import TextTable

    columns = ("data set", "method", "seeds", "images", "gain", "better / worse", "p")
    rows = tuple(
        (
            cell.column,
            cell.row,
            str(len(cell.runs)),
            str(cell.test.images),
            f"{cell.gain:+.2f}",
            f"{cell.test.repaired} / {cell.test.broken}",
            p_value(cell.test.p),
        )
        for cell in table.cells.values()
        if cell.test is not None and cell.gain is not None
    )
    return TextTable(columns, rows, labels=2, title=f"against {table.baseline}")


test_table.__test__ = False  # type: ignore[attr-defined]


def footnotes(table: Comparison) -> list[str]:
    """What the signs in the table mean."""
    from cliquetta.evaluation.comparison import MARKS

    lines = [f"{mark} {MARKS[mark]}" for mark in table.marks]
    if any(cell.better for cell in table.cells.values()):
        lines.append(f"▲ ▼ answers better or worse than {table.baseline}, p < 0.05 (paired, exact)")
    if not any(cell.test for cell in table.cells.values()):
        lines.append(f"no run of {table.baseline} with the same seed and model to test against")
    return lines


def spread(cell: Cell) -> str:
    """Mean over seeds, with the standard deviation where there are several."""
    return number(cell.mean) if cell.sd is None else f"{number(cell.mean)} ± {number(cell.sd)}"


def p_value(p: float) -> str:
    """A p-value; very small ones by their order."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def _plain(cell: Cell) -> dict[str, Any]:
    """A cell as JSON types."""
    first = cell.runs[0].record
    stream, prompts = first.settings["stream"], first.settings["prompts"]
    return {
        "dataset": cell.column,
        "method": cell.row,
        "preset": first.preset,
        "marks": cell.marks,
        "model": first.settings["model"]["id"],
        "views": stream["views"]["count"] if stream["views"] else 1,
        "templates": len(prompts["templates"]),
        "batch_size": stream["batch_size"],
        "seeds": [run.record.seed for run in cell.runs],
        "images": first.images,
        "metric": cell.metric,
        "mean": cell.mean,
        "sd": cell.sd,
        "gain": cell.gain,
        "repaired": cell.test.repaired if cell.test else None,
        "broken": cell.test.broken if cell.test else None,
        "p": cell.test.p if cell.test else None,
        "records": [str(run.folder / "record.json") for run in cell.runs],
    }


def _flat(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value
