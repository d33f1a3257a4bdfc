"""``cliquetta compare``: recorded runs in one table, for the terminal or for a paper."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cliquetta.atomic import write_atomically
from cliquetta.cli.checks import check_runs
from cliquetta.cli.command import Common
from cliquetta.cli.console import Terminal, count, number
from cliquetta.decimals import signed
from cliquetta.errors import UserError, look_up
from cliquetta.evaluation.metric_table import METRICS
from cliquetta.evaluation.tables import TextTable, to_csv, to_latex, to_markdown

if TYPE_CHECKING:
    from cliquetta.evaluation.comparison import Cell, Comparison

Format = Literal["terminal", "markdown", "csv", "latex"]
EXAMPLES = """
cliquetta compare runs
cliquetta compare runs --format latex > table.tex
cliquetta compare runs other/runs --baseline tda --metric ece
cliquetta compare runs --split --format csv > everything.csv
"""


def compare(
    common: Common,
    runs: Annotated[
        list[Path],
        typer.Argument(help="Directories of runs, or files written by --save."),
    ],
    format: Annotated[
        Format, "Output format; csv has one row per method and dataset."
    ] = "terminal",
    baseline: Annotated[
        str, "Method to test against: NAME or NAME:PRESET."
    ] = "zero_shot",
    metric: Annotated[str, f"{', '.join(METRICS)}."] = "top1",
    save: Annotated[
        Path | None,
        "Write the records to one small file, without predictions per image.",
    ] = None,
    split: Annotated[
        bool, "Put runs that are not comparable into separate columns."
    ] = False,
) -> None:
    """Tabulate recorded runs.

    Shown are mean ± standard deviation over seeds, and a paired test. Runs with
    different preprocessing, templates, class names or images are not put into one
    column. ▲ and ▼ mark methods that predict better or worse than the baseline (p <
    0.05, exact paired test over images, not corrected for the number of cells).
    """
    check_runs(runs)
    look_up("metric", metric, METRICS)

    from cliquetta.evaluation.comparison import compare as tabulate
    from cliquetta.evaluation.record import find_runs, pack_records

    finished, unfinished = find_runs(runs)
    if unfinished:
        common.terminal.warn(f"left out: {count(len(unfinished), 'unfinished run')}")
    if not finished:
        raise UserError(
            "none of these runs is finished: give their command again to go on"
        )
    if save is not None:
        write_atomically(save, pack_records(run.record for run in finished).encode())
        common.terminal.say(f"{count(len(finished), 'record')} in {save}")
    table = tabulate(finished, baseline=baseline, metric=metric, split=split)
    present(table, common.terminal, format)


def present(
    table: "Comparison", terminal: Terminal, format: Format = "terminal"
) -> None:
    """Write a comparison to stdout."""
    entries = [_plain(cell) for cell in table.cells.values()]
    terminal.document(entries)
    if terminal.json:
        return
    parts = (main_table(table), overall_table(table), paired_table(table))
    tables = [part for part in parts if part.rows]
    notes = footnotes(table)
    if format == "csv":
        rows = [[_csv_value(value) for value in entry.values()] for entry in entries]
        text = to_csv(list(entries[0]), rows)
    elif format == "markdown":
        text = "\n".join([*map(to_markdown, tables), "\n".join(notes)]) + "\n"
    elif format == "latex":
        comments = "\n".join(f"% {line}" for line in notes)
        text = "\n".join([*map(to_latex, tables), comments]) + "\n"
    else:
        for shown in tables:
            right = shown.columns[shown.labels :]
            terminal.table(shown.columns, shown.rows, title=shown.title, right=right)
        for line in notes:
            terminal.say(line)
        return
    terminal.out.file.write(text)


def _csv_value(value: Any) -> Any:
    """Write a list with blanks between its values."""
    return " ".join(map(str, value)) if isinstance(value, list) else value


def main_table(table: "Comparison") -> TextTable:
    """Tabulate methods by datasets: means over seeds, with standard deviations of several."""
    rows = []
    for row in table.rows:
        texts = []
        marks = ""
        for column in table.columns:
            cell = table.cells.get((row, column))
            if cell is None:
                texts.append("–")
                continue
            texts.append(f"{number(cell.mean, sd=cell.sd)}{cell.better}")
            marks += cell.marks
        each_once = "".join(dict.fromkeys(marks))
        rows.append((f"{row} {each_once}".strip(), *texts))

    # LaTeX prints the best mean of a column in bold.
    best = set()
    for place, column in enumerate(table.columns, start=1):
        winner = table.best(column)
        if winner is not None:
            best.add((table.rows.index(winner), place))
    return TextTable(
        columns=("method", *table.columns),
        rows=tuple(rows),
        title=METRICS[table.metric].title,
        best=frozenset(best),
    )


def overall_table(table: "Comparison") -> TextTable:
    """Tabulate every method over all datasets, each counted once.

    The baseline comes first, then methods by gain. A method that lacks a dataset is
    behind them, and says how many it has: its means are over other images.
    """
    summaries = [table.overall(row) for row in table.rows]
    sign = -1 if METRICS[table.metric].lower_is_better else 1
    ranked = [row for row in summaries[1:] if row.complete]
    ranked.sort(key=lambda row: -sign * (row.gain or 0.0))
    unranked = [row for row in summaries[1:] if not row.complete]
    summaries = [*summaries[:1], *ranked, *unranked]

    has_tail = any(row.tail is not None for row in summaries)
    several = any(len(row.columns) > 1 for row in summaries)
    lines = []
    for row in summaries:
        line = {"method": row.row, "datasets": row.datasets}
        line["average"] = number(row.mean)
        if has_tail:
            line["worst tenth"] = number(row.tail)
        line["gain"] = with_interval(row.gain, row.half_width)
        if several:
            line["worst"] = "–"
            if row.worst is not None:
                lowest, dataset = row.worst
                line["worst"] = f"{signed(lowest)} ({dataset})"

        line["p"] = "–" if row.p is None else p_value(row.p)
        line[METRICS["ece"].heading] = number(row.ece)
        line["cost"] = "–" if row.cost is None else f"{row.cost:.3g} ×"
        lines.append(line)
    return TextTable(
        columns=tuple(lines[0]),
        rows=tuple(tuple(line.values()) for line in lines),
        title="over all datasets",
    )


def paired_table(table: "Comparison") -> TextTable:
    """Tabulate every method against the baseline, with predictions repaired and broken."""
    columns = ("dataset", "method", "seeds", "images", "gain", "better / worse", "p")
    rows = []
    for cell in table.cells.values():
        test = cell.test
        if test is not None and cell.gain is not None:
            row = (
                cell.column,
                cell.row,
                str(len(cell.runs)),
                str(test.images),
                with_interval(cell.gain, cell.half_width),
                f"{test.repaired} / {test.broken}",
                p_value(test.p),
            )
            rows.append(row)
    return TextTable(columns, tuple(rows), labels=2, title=f"against {table.baseline}")


def with_interval(gain: float | None, half_width: float | None) -> str:
    """Write a gain with the half-width of its 95 % interval, where that is known."""
    text = number(gain, signed=True)
    if gain is None or half_width is None:
        return text
    return f"{text} ± {half_width:.2f}"


def footnotes(table: "Comparison") -> list[str]:
    """Explain the signs in the table."""
    from cliquetta.evaluation.comparison import MARKS

    lines = [f"{mark} {MARKS[mark]}" for mark in table.marks]
    cells = table.cells.values()
    against = table.baseline
    if any(cell.better for cell in cells):
        lines.append(
            f"▲ ▼ predicts better or worse than {against}, p < 0.05 (paired, exact)"
        )
    if any(cell.tail is not None for cell in cells):
        lines.append(
            "worst tenth: mean over the worst tenth of the seeds, ten seeds or more"
        )
    summaries = [table.overall(row) for row in table.rows]
    if any(cell.half_width is not None for cell in cells):
        lines.append("±: half of the 95 % interval of a gain, over images or datasets")
    if not all(row.complete for row in summaries):
        lines.append(
            "n of m: means over n of the m datasets, not ranked among the others"
        )
    if any(cell.cost for cell in cells):
        lines.append(
            "cost: time per image as a multiple of zero_shot's on the same images"
        )
    if not any(cell.gain is not None for cell in cells):
        lines.append(
            f"no run of {against} with the same seed and model to test against"
        )
    return lines


def p_value(p: float) -> str:
    """Write a p-value; very small ones by their order."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def _plain(cell: "Cell") -> dict[str, Any]:
    """Write a cell as JSON types."""
    first = cell.runs[0].record
    stream = first.settings["stream"]
    test = cell.test
    records = []
    for run in cell.runs:
        path = None if run.folder is None else str(run.folder / "record.json")
        records.append(path or run.record.id)
    return {
        "dataset": cell.column,
        "method": cell.row,
        "preset": first.preset,
        "marks": cell.marks,
        "model": first.settings["model"]["id"],
        "views": stream["views"]["count"] if stream["views"] else 1,
        "templates": len(first.settings["prompts"]["templates"]),
        "batch_size": stream["batch_size"],
        "seeds": [run.record.seed for run in cell.runs],
        "images": first.images,
        "metric": cell.metric,
        "mean": cell.mean,
        "sd": cell.sd,
        "tail": cell.tail,
        "gain": cell.gain,
        "half_width": cell.half_width,
        "repaired": test.repaired if test else None,
        "broken": test.broken if test else None,
        "p": test.p if test else None,
        "ece": cell.ece,
        "cost": cell.cost,
        "records": records,
    }
