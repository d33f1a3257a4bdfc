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
from cliquetta.evaluation.tables import TextTable, to_csv, to_latex, to_markdown

if TYPE_CHECKING:
    from cliquetta.evaluation.comparison import Cell, Comparison

Format = Literal["terminal", "markdown", "csv", "latex"]
_TITLES = {
    "top1": "top-1 %",
    "top5": "top-5 %",
    "mean_class": "mean accuracy of classes %",
    "macro_f1": "macro-F1 %",
    "ece": "ECE %",
    "nll": "NLL",
    "auroc": "AUROC % of unknown images",
    "fpr95": "FPR95 % of unknown images",
}
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
    metric: Annotated[str, f"{', '.join(_TITLES)}."] = "top1",
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
    look_up("metric", metric, _TITLES)

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
    tables = [
        t
        for t in (main_table(table), overall_table(table), paired_table(table))
        if t.rows
    ]
    notes = footnotes(table)
    if format == "csv":
        rows = [
            [
                " ".join(map(str, v)) if isinstance(v, list) else v
                for v in entry.values()
            ]
            for entry in entries
        ]
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


def main_table(table: "Comparison") -> TextTable:
    """Methods by datasets: means over seeds, with standard deviations where there are several."""
    rows = []
    for row in table.rows:
        cells = [table.cells.get((row, column)) for column in table.columns]
        shown = [
            "–" if c is None else f"{number(c.mean, sd=c.sd)}{c.better}" for c in cells
        ]
        marks = "".join(dict.fromkeys(m for cell in cells if cell for m in cell.marks))
        rows.append((f"{row} {marks}".strip(), *shown))
    best = frozenset(
        (number, place)
        for number, row in enumerate(table.rows)
        for place, column in enumerate(table.columns, start=1)
        if table.best(column) == row
    )
    columns = ("method", *table.columns)
    return TextTable(columns, tuple(rows), title=_TITLES[table.metric], best=best)


def overall_table(table: "Comparison") -> TextTable:
    """Every method over all datasets, each counted once.

    The baseline comes first, then methods by gain. A method that lacks a dataset is
    behind them, and says how many it has: its means are over other images.
    """
    from cliquetta.evaluation.comparison import LOWER_IS_BETTER

    summaries = [table.overall(row) for row in table.rows]
    first = summaries[:1]
    ranked = [row for row in summaries[1:] if row.complete]
    unranked = [row for row in summaries[1:] if not row.complete]
    sign = -1 if table.metric in LOWER_IS_BETTER else 1
    ranked.sort(key=lambda row: -sign * (row.gain or 0.0))
    summaries = [*first, *ranked, *unranked]
    tail = ("worst tenth",) if any(row.tail is not None for row in summaries) else ()
    several = any(len(row.columns) > 1 for row in summaries)
    lowest = ("worst",) if several else ()
    columns = (
        "method",
        "datasets",
        "average",
        *tail,
        "gain",
        *lowest,
        "p",
        "ECE %",
        "cost",
    )
    rows = []
    for row in summaries:
        means = (number(row.mean), *(number(row.tail) for _ in tail))
        gain = with_interval(row.gain, row.half_width)
        worst = "–"
        if row.worst is not None:
            worst = f"{signed(row.worst[0])} ({row.worst[1]})"
        lowest_gain = (worst,) if several else ()
        p = "–" if row.p is None else p_value(row.p)
        cost = "–" if row.cost is None else f"{row.cost:.3g} ×"
        figures = (gain, *lowest_gain, p, number(row.ece), cost)
        rows.append((row.row, row.datasets, *means, *figures))
    return TextTable(columns, tuple(rows), title="over all datasets")


def paired_table(table: "Comparison") -> TextTable:
    """Every method against the baseline; predictions that became right, and that became wrong."""
    columns = ("dataset", "method", "seeds", "images", "gain", "better / worse", "p")
    rows = []
    for cell in table.cells.values():
        if cell.test is not None and cell.gain is not None:
            seeds, images = str(len(cell.runs)), str(cell.test.images)
            changes = f"{cell.test.repaired} / {cell.test.broken}"
            gain = with_interval(cell.gain, cell.half_width)
            p = p_value(cell.test.p)
            rows.append((cell.column, cell.row, seeds, images, gain, changes, p))
    return TextTable(columns, tuple(rows), labels=2, title=f"against {table.baseline}")


def with_interval(gain: float | None, half_width: float | None) -> str:
    """Write a gain with the half-width of its 95 % interval, where that is known."""
    text = number(gain, signed=True)
    return text if gain is None or half_width is None else f"{text} ± {half_width:.2f}"


def footnotes(table: "Comparison") -> list[str]:
    """Explain the signs in the table."""
    from cliquetta.evaluation.comparison import MARKS

    lines = [f"{mark} {MARKS[mark]}" for mark in table.marks]
    cells, against = table.cells.values(), table.baseline
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
    """A p-value; very small ones by their order."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def _plain(cell: "Cell") -> dict[str, Any]:
    """A cell as JSON types."""
    first = cell.runs[0].record
    stream, prompts = first.settings["stream"], first.settings["prompts"]
    test = cell.test
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
        "tail": cell.tail,
        "gain": cell.gain,
        "half_width": cell.half_width,
        **{
            name: getattr(test, name) if test else None
            for name in ("repaired", "broken", "p")
        },
        "ece": cell.ece,
        "cost": cell.cost,
        "records": [
            run.record.id if run.folder is None else str(run.folder / "record.json")
            for run in cell.runs
        ],
    }
