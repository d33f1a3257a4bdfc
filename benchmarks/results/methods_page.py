"""The pages that compare all methods, and the settings of one, as Markdown."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.results import COMMAND
from benchmarks.results.settings import (
    CLEAN,
    DEVELOPMENT,
    REPORT,
    Setting,
    rank,
)
from benchmarks.results.texts import (
    BLANK,
    as_item,
    figure,
    fill,
    gain_with_interval,
    linked,
    method_of,
    short_id,
    times,
)
from cliquetta.decimals import signed
from cliquetta.evaluation.comparison import Cell, Overall, compare, grouped
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.tables import TextTable, to_markdown
from cliquetta.methods.building.registry import MethodEntry, get_method, method_entries

COLUMNS = 8  # datasets of a table shift by shift
KINDS = {
    "independent": "*Images come alone and nothing may be kept* (independent).",
    "sequential": "*One stream, remembered image by image* (sequential).",
    "joint": "*Batches of many images, which inform each other* (joint).",
    "few shots": "*A few labelled images of each class* (few shots).",
}
READING = (
    "*Gain*: points over zero-shot on exactly the same images, ± half of the 95 % interval over "
    "datasets (Student's t); *p* is a paired two-sided sign-flip test over datasets. Both are "
    "given from six datasets on. Settings of "
    "methods may be chosen on datasets marked *dev*; *gain, not dev* leaves them out.",
    "*Accuracy*: mean over shifted datasets ± standard deviation over seeds, in percent. Rows are "
    "ranked over the same data only: those over other images, or over *n of m* datasets, follow "
    "behind the others and are in no ranking.",
    "*Worst*: the lowest gain and where. *ECE*: calibration error in percent. *Cost*: time per "
    "image as a multiple of zero-shot's, among many runs that shared a GPU; the speed of methods "
    "alone is in the [results](../results/README.md).",
)


def methods_page(
    bundled: Sequence[Setting],
    real: Sequence[Setting],
    streams: Sequence[Setting],
    folder: Path,
) -> str:
    """Write every method beside what was recorded of it; ``folder`` holds their pages."""
    about = (
        f"Written by `{COMMAND} methods` from the records in `docs/results`: do not "
        "edit it. Each name leads to the method's own page."
    )
    choices = [
        as_item(f"{text} {_ranking(bundled, kind)}") for kind, text in KINDS.items()
    ]
    parts = [
        "# The methods compared",
        fill(about),
        "## How to read and choose",
        "\n".join(map(as_item, READING)),
        "What your images allow decides first; within that, by gain on the shifts of the bundled "
        "set that all of the ranked methods were run on:",
        "\n".join(choices),
    ]
    towers = {"Bundled set": bundled, "Real ViT-B/16 image tower": real}
    for title, settings in towers.items():
        if settings:
            parts += [f"## {title}", _every_method(settings, folder)]
            parts += ["### Shift by shift", *_by_dataset(settings[0])]
    if streams:
        parts.append("## Other streams and batch sizes")
    for setting in streams:
        parts += [f"### {setting.title}", _every_method([setting], folder)]

    # Methods that cannot run on a side, or came later, are named as well.
    ran: set[str] = set()
    for setting in [*bundled, *real]:
        ran.update(map(method_of, setting.table.rows))
    missing = []
    for entry in method_entries():
        if entry.name not in ran:
            missing.append(as_item(f"{linked(entry.name, folder)}: {entry.summary}."))
    parts.append("## What was not run")
    parts.append("\n".join(missing) or "Nothing: every method has a row.")
    parts += ["## Sources", sources([*bundled, *real, *streams])]
    return "\n\n".join(parts) + "\n"


def ablation_page(settings: Sequence[Setting]) -> str:
    """Write the ablation of a method: one row per config, every dataset in its column."""
    parts = [
        "# Ablations",
        f"Written by `{COMMAND} ablation` from records: do not edit it.",
        "\n".join(map(as_item, READING[:2])),
    ]
    for setting in settings:
        parts += [f"## {setting.title}", *_by_dataset(setting, overall=True)]
    parts += ["## Sources", sources(settings)]
    return "\n\n".join(parts) + "\n"


def sources(settings: Iterable[Setting]) -> str:
    """Write dates, hardware and versions of the runs, one line per setting."""
    lines = []
    for setting in settings:
        dates = set()
        machines = set()
        seeds = set()
        for run in setting.runs:
            dates.add(run.record.finished[:10])
            seeds.add(run.record.seed)
            about = run.record.environment
            machines.add(f"{about['device_name']}, torch {about['versions']['torch']}")
        days = min(dates)
        if len(dates) > 1:
            days += f" to {max(dates)}"
        facts = f"{days}, {'; '.join(sorted(machines))}"
        runs = f"{len(setting.runs)} runs, seeds {sorted(seeds)}"
        lines.append(as_item(f"{setting.title}: {runs}, {facts}."))
    return "\n".join(lines)


def _every_method(settings: Sequence[Setting], folder: Path) -> str:
    """Write a row per method, wherever it was run; slow ones may have a setting of their own.

    Only rows over all datasets and images of the first setting are ranked, the others
    follow.
    """
    first_of: dict[str, tuple[Setting, Overall]] = {}
    for setting in settings:
        for row in setting.rows:
            first_of.setdefault(row.row, (setting, row))

    def place(pair: tuple[Setting, Overall]) -> tuple[bool, tuple[bool, bool, float]]:
        setting, row = pair
        return setting is not settings[0], rank(row)

    rows = []
    for setting, row in sorted(first_of.values(), key=place):
        rows.append(_method_row(setting, row, folder))
    head = (
        "method",
        "images of a batch",
        "accuracy",
        "gain",
        "gain, not dev",
        "worst",
        "ECE",
        "cost",
        "datasets × images",
    )
    table = to_markdown(TextTable(head, tuple(rows), labels=2)).rstrip()
    titles = fill("; ".join(setting.title for setting in settings))
    return f"{titles}\n\n{table}"


def _method_row(setting: Setting, row: Overall, folder: Path) -> tuple[str, ...]:
    """Write the cells of one method."""
    accuracy = figure(row.mean, ".2f")
    if row.sd is not None:
        accuracy += f" ± {row.sd:.2f}"
    # Settings of methods may have been chosen on datasets of the role `dev`.
    untouched = setting.table.overall(row.row, setting.columns(REPORT))
    worst = BLANK
    if row.worst is not None:
        lowest, dataset = row.worst
        worst = f"{signed(lowest)} ({short_id(dataset)})"
    return (
        linked(row.row, folder),
        _kind(get_method(method_of(row.row))),
        accuracy,
        _gain(row),
        figure(untouched.gain, "+.2f"),
        worst,
        figure(row.ece, ".1f"),
        times(row.cost),
        f"{row.datasets} × {row.images:,}",
    )


def _by_dataset(setting: Setting, *, overall: bool = False) -> list[str]:
    """Write methods by datasets, in tables of a few datasets each; ``overall`` adds the gain."""
    names = [*setting.shifted, *setting.columns(CLEAN)]
    tables = []
    for start in range(0, len(names), COLUMNS):
        some = names[start : start + COLUMNS]
        columns = ["method"]
        if overall:
            columns.append("gain")
        columns += [_heading(setting, name) for name in some]
        rows = []
        for row in setting.rows:
            cells = [f"`{row.row}`"]
            if overall:
                cells.append(_gain(row))
            for name in some:
                cells.append(_cell(setting.table.cells.get((row.row, name))))
            rows.append(tuple(cells))
        table = TextTable(tuple(columns), tuple(rows))
        tables.append(to_markdown(table).rstrip())
    return tables


def _heading(setting: Setting, dataset: str) -> str:
    """Name a dataset, marked where it is not what gains are reported on."""
    role = setting.roles.get(dataset)
    mark = f" ({role})" if role in (DEVELOPMENT, CLEAN) else ""
    return short_id(dataset) + mark


def _cell(cell: Cell | None) -> str:
    if cell is None or cell.mean is None:
        return BLANK
    gain = "" if cell.gain is None else f" ({signed(cell.gain, 1)})"
    return f"{cell.mean:.1f}{gain}"


def _ranking(settings: Sequence[Setting], kind: str) -> str:
    """Rank the methods of a kind over the datasets that all of them have; name the others."""
    names = set()
    for entry in method_entries():
        if _kind(entry) == kind and entry.name != BASELINE:
            names.add(entry.name)

    gains = _shared_gains(settings)
    ranked = []
    for label in sorted(gains, key=lambda label: -gains[label]):
        if method_of(label) in names:
            ranked.append(f"`{label}` {signed(gains[label])}")

    # Slow methods saw fewer images: they are named, not ranked.
    labels = dict.fromkeys(row.row for setting in settings for row in setting.rows)
    unranked = []
    for label in labels:
        if label not in gains and method_of(label) in names:
            unranked.append(f"`{label}`")

    text = ", ".join(ranked)
    if unranked:
        start = "; on" if ranked else "On"
        text += f"{start} other images, not ranked: {', '.join(unranked)}"
    return text or "Nothing is recorded."


def _shared_gains(settings: Sequence[Setting]) -> dict[str, float]:
    """Compute gains over the same datasets, in the setting that most methods were run in."""
    # Settings of one title are one table: blocks of a grid may share them.
    largest: list[Overall] = []
    for alike in grouped(settings, lambda setting: setting.title).values():
        runs = [run for setting in alike for run in setting.runs]
        table = compare(runs)
        roles = alike[0].roles
        shared = []
        for column in table.columns:
            in_all_rows = all((row, column) in table.cells for row in table.rows)
            if in_all_rows and roles.get(column, REPORT) != CLEAN:
                shared.append(column)
        if shared and len(table.rows) > len(largest):
            largest = [table.overall(row, shared) for row in table.rows]
    return {row.row: row.gain for row in largest if row.gain is not None}


def _gain(row: Overall) -> str:
    """Write a gain with its interval and the p-value of its test, where they are known."""
    text = gain_with_interval(row)
    if row.gain is None or row.p is None:
        return text
    return f"{text} (p {row.p:.2g})"


def _kind(entry: MethodEntry) -> str:
    if entry.fit is not None:
        return "few shots"
    return entry.adapter.batch_dependence.value
