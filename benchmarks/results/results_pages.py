"""README's headline table and the pages of results, as Markdown, from records alone."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.results import COMMAND
from benchmarks.results.grid_files import GRIDS, grid_file
from cliquetta.decimals import signed
from cliquetta.errors import UserError
from cliquetta.evaluation.comparison import Cell, Comparison, Overall, compare, grouped
from cliquetta.evaluation.grid import BASELINE, grid_roles
from cliquetta.evaluation.record import Record, Run, unpack_records
from cliquetta.evaluation.tables import TextTable, to_markdown
from cliquetta.methods.registry import MethodEntry, get_method, method_entries

BEGIN = f"<!-- headline: {COMMAND} headline -->"
END = "<!-- /headline -->"
BLANK = "–"
REPORT, DEVELOPMENT, CLEAN = "report", "dev", "clean"
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


@dataclass(frozen=True)
class Setting:
    """Runs that differ in dataset, method and seed only."""

    title: str
    runs: tuple[Run, ...]
    roles: Mapping[
        str, str
    ]  # ``dev``, ``clean`` or ``report`` by dataset; the last by default

    @cached_property
    def table(self) -> Comparison:
        """Methods by datasets."""
        return compare(self.runs)

    def columns(self, *roles: str) -> list[str]:
        """The datasets that have one of some roles."""
        return [c for c in self.table.columns if self.roles.get(c, REPORT) in roles]

    @property
    def shifted(self) -> list[str]:
        """All datasets but the clean ones; all if there are no others."""
        return self.columns(REPORT, DEVELOPMENT) or list(self.table.columns)

    @cached_property
    def rows(self) -> list[Overall]:
        """Every method over the shifted datasets: zero-shot first, then by gain."""
        rows = [self.table.overall(row, self.shifted) for row in self.table.rows]
        return sorted(rows, key=_rank)


def _rank(row: Overall) -> tuple[bool, bool, float]:
    """Order zero-shot first, then by gain; behind them rows that lack datasets."""
    return row.row != BASELINE, not row.complete, -(row.gain or 0.0)


def read_settings(records: Iterable[Record], roles: Mapping[str, str]) -> list[Setting]:
    """Records by all that must be equal in one table, those of most datasets first."""
    groups = grouped([Run(record, None) for record in records], _title)
    settings = [Setting(title, tuple(runs), roles) for title, runs in groups.items()]
    return sorted(settings, key=lambda s: (-len(s.table.columns), -len(s.table.rows)))


def _title(run: Run) -> str:
    stream, model, order = (
        run.record.settings["stream"],
        run.record.settings["model"],
        run.order,
    )
    facts = [f"{n} {value}" for n, value in run.own_order.items() if n != "batch_size"]
    facts += [f"gamma {stream['dirichlet']}"] if stream["dirichlet"] is not None else []
    order += f" ({', '.join(facts)})" if facts else ""
    limit = f", {stream['limit']} images per dataset" if stream["limit"] else ""
    limit += ", open set" if "unknown" in stream else ""
    return (
        f"{model['id']}, {model['dtype']}, {order}, batch {stream['batch_size']}{limit}"
    )


def insert_headline(text: str, table: str) -> str:
    """A README with the table between its two marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README needs a line {BEGIN!r} and a line {END!r}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def methods_page(
    bundled: Sequence[Setting],
    real: Sequence[Setting],
    streams: Sequence[Setting],
    folder: Path,
) -> str:
    """Every registered method beside what was recorded of it; ``folder`` holds their pages."""
    parts = [
        "# The methods compared",
        fill(
            f"Written by `{COMMAND} methods` from the records in `docs/results`: do not "
            "edit it. Each name leads to the method's own page."
        ),
        "## How to read and choose",
        "\n".join(map(as_item, READING)),
        "What your images allow decides first; within that, by gain on the shifts of the bundled "
        "set that all of the ranked methods were run on:",
        "\n".join(
            as_item(f"{text} {_ranking(bundled, kind)}") for kind, text in KINDS.items()
        ),
    ]
    for title, settings in (
        ("Bundled set", bundled),
        ("Real ViT-B/16 image tower", real),
    ):
        if settings:
            parts += [f"## {title}", _every_method(settings, folder)]
            parts += ["### Shift by shift", *_by_dataset(settings[0])]
    if streams:
        parts += ["## Other streams and batch sizes"]
    for setting in streams:
        parts += [f"### {setting.title}", _every_method([setting], folder)]
    ran = {
        method_of(row) for setting in [*bundled, *real] for row in setting.table.rows
    }
    missing = [entry for entry in method_entries() if entry.name not in ran]
    lines = [
        as_item(f"{linked(entry.name, folder)}: {entry.summary}.") for entry in missing
    ]
    parts += [
        "## What was not run",
        "\n".join(lines) or "Nothing: every method has a row.",
    ]
    parts += ["## Sources", sources([*bundled, *real, *streams])]
    return "\n\n".join(parts) + "\n"


def ablation_page(settings: Sequence[Setting]) -> str:
    """The ablation of a method: one row per config, every dataset in its column."""
    parts = [
        "# Ablations",
        f"Written by `{COMMAND} ablation` from records: do not edit it.",
        "\n".join(map(as_item, READING[:2])),
    ]
    for setting in settings:
        parts += [f"## {setting.title}", *_by_dataset(setting, overall=True)]
    return "\n\n".join([*parts, "## Sources", sources(settings)]) + "\n"


def sources(settings: Iterable[Setting]) -> str:
    """Dates, hardware and versions of the runs, one line per setting."""
    lines = []
    for setting in settings:
        records = [run.record for run in setting.runs]
        dates = sorted({record.finished[:10] for record in records})
        about = [record.environment for record in records]
        machines = {
            f"{e['device_name']}, torch {e['versions']['torch']}" for e in about
        }
        seeds = sorted({record.seed for record in records})
        days = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
        facts = f"{days}, {'; '.join(sorted(machines))}"
        lines.append(
            as_item(f"{setting.title}: {len(records)} runs, seeds {seeds}, {facts}.")
        )
    return "\n".join(lines)


def _every_method(settings: Sequence[Setting], folder: Path) -> str:
    """One row per method, wherever it was run; slow ones may have a setting of their own.

    Only rows over all datasets and images of the first setting are ranked, the others
    follow.
    """
    head = (
        "method",
        "images of a batch",
        "accuracy",
        "gain",
        "gain, not dev",
        "worst",
        "ECE",
    )
    first: dict[str, tuple[Setting, Overall]] = {}
    for setting in settings:
        for row in setting.rows:
            first.setdefault(row.row, (setting, row))
    rows = []

    def rank(pair: tuple[Setting, Overall]) -> tuple[bool, tuple[bool, bool, float]]:
        return pair[0] is not settings[0], _rank(pair[1])

    for setting, row in sorted(first.values(), key=rank):
        untouched = setting.table.overall(row.row, setting.columns(REPORT)).gain
        kind = _kind(get_method(method_of(row.row)))
        accuracy = shown(row.mean, ".2f") + (
            "" if row.sd is None else f" ± {row.sd:.2f}"
        )
        worst = (
            BLANK
            if row.worst is None
            else f"{signed(row.worst[0])} ({short_id(row.worst[1])})"
        )
        gains = (_gain(row), shown(untouched, "+.2f"), worst)
        size = f"{row.datasets} × {row.images:,}"
        costs = (shown(row.ece, ".1f"), times(row.cost), size)
        rows.append((linked(row.row, folder), kind, accuracy, *gains, *costs))
    table = TextTable((*head, "cost", "datasets × images"), tuple(rows), labels=2)
    return (
        f"{fill('; '.join(s.title for s in settings))}\n\n{to_markdown(table).rstrip()}"
    )


def _by_dataset(setting: Setting, *, overall: bool = False) -> list[str]:
    """Methods by datasets, in tables of a few datasets each."""
    names, tables = [*setting.shifted, *setting.columns(CLEAN)], []
    marks = {DEVELOPMENT: " (dev)", CLEAN: " (clean)"}
    for start in range(0, len(names), COLUMNS):
        some = names[start : start + COLUMNS]
        head = [
            short_id(name) + marks.get(setting.roles.get(name, ""), "") for name in some
        ]
        rows = []
        for row in setting.rows:
            cells = [_cell(setting.table.cells.get((row.row, name))) for name in some]
            rows.append((f"`{row.row}`", *([_gain(row)] if overall else []), *cells))
        columns = ("method", *(["gain"] if overall else []), *head)
        tables.append(to_markdown(TextTable(columns, tuple(rows))).rstrip())
    return tables


def _cell(cell: Cell | None) -> str:
    if cell is None or cell.mean is None:
        return BLANK
    return f"{cell.mean:.1f}" + (
        "" if cell.gain is None else f" ({signed(cell.gain, 1)})"
    )


def _ranking(settings: Sequence[Setting], kind: str) -> str:
    """The methods of a kind by gain over the datasets that all of them have; then the others."""
    names = {
        e.name for e in method_entries() if _kind(e) == kind and e.name != BASELINE
    }
    ranked = _shared_gains(settings)
    ordered = sorted(ranked.items(), key=lambda item: -item[1])
    shown = [
        f"`{name}` {signed(gain)}" for name, gain in ordered if method_of(name) in names
    ]
    rows = dict.fromkeys(row.row for setting in settings for row in setting.rows)
    others = [
        f"`{row}`" for row in rows if row not in ranked and method_of(row) in names
    ]
    text = ", ".join(shown)
    if others:
        text += (
            f"{'; o' if shown else 'O'}n other images, not ranked: {', '.join(others)}"
        )
    return text or "Nothing is recorded."


def _shared_gains(settings: Sequence[Setting]) -> dict[str, float]:
    """Gains over the same datasets, in the setting that most methods were run in."""
    alike = grouped(settings, lambda setting: setting.title).values()
    tables = []
    for some in alike:
        joined = compare([run for setting in some for run in setting.runs])
        shifted = [c for c in joined.columns if some[0].roles.get(c, REPORT) != CLEAN]
        shared = [
            c for c in shifted if all((row, c) in joined.cells for row in joined.rows)
        ]
        if shared:
            tables.append([joined.overall(row, shared) for row in joined.rows])
    rows = max(tables, key=len, default=[])
    return {row.row: row.gain for row in rows if row.gain is not None}


def _gain(row: Overall) -> str:
    if row.gain is None:
        return BLANK
    spread = "" if row.half_width is None else f" ± {row.half_width:.2f}"
    return f"{signed(row.gain)}{spread}" + (
        "" if row.p is None else f" (p {row.p:.2g})"
    )


def _kind(entry: MethodEntry) -> str:
    return (
        "few shots" if entry.fit is not None else entry.adapter.batch_dependence.value
    )


def linked(label: str, folder: Path, way: str = "") -> str:
    """The label of a row, leading to the method's page where ``folder`` has one."""
    page = folder / f"{method_of(label)}.md"
    return f"[`{label}`]({way}{page.name})" if page.exists() else f"`{label}`"


def method_of(label: str) -> str:
    """The registered name in the label of a row."""
    return label.split()[0].partition(":")[0]


def short_id(dataset: str) -> str:
    """The id without the folder that its files are in."""
    return (
        dataset.partition(" with unknown")[0].rpartition("/")[2].replace("bundled@", "")
    )


def shown(value: float | None, form: str) -> str:
    """A figure of a table; a dash where there is none."""
    return BLANK if value is None else format(round(value, int(form[-2])) + 0.0, form)


def times(cost: float | None) -> str:
    """A cost as a multiple."""
    return BLANK if cost is None else f"{cost:.3g} ×"


def fill(text: str, indent: str = "") -> str:
    """A paragraph of a page; ``indent`` is for its second line and those after it."""
    wrapper = textwrap.TextWrapper(
        100, "", indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(text)


def as_item(text: str) -> str:
    """An item of a list."""
    return fill(f"- {text}", "  ")


@dataclass(frozen=True)
class ResultsPages:
    """The files of records, and the pages written from them."""

    results: Path
    readme: Path
    methods: Path

    def records(self, grid: str) -> Path:
        """The records of a grid."""
        return self.results / f"{grid}.json"

    def texts(self, page: str) -> dict[Path, str]:
        """The texts of a page's files, as its records say."""
        # which are made of this module
        from benchmarks.results.headline import (
            headline_picture,
            headline_table,
            read_costs,
            read_headline,
        )
        from benchmarks.results.imagenet_page import imagenet_page
        from benchmarks.results.leaderboard import BOARDS, board_rows, leaderboard_page
        from benchmarks.results.leaderboard_figure import leaderboard_figure

        records = {
            grid: unpack_records(self.records(grid))
            if self.records(grid).exists()
            else []
            for grid in GRIDS[page]
        }
        if page == "published":
            return self._published(records["published-imagenet"])
        roles = {grid: grid_roles(grid_file(grid)) for grid in records}
        if page == "leaderboard":
            boards = {
                BOARDS[g]: (some, board_rows(some, roles[g]))
                for g, some in records.items()
            }
            figure = leaderboard_figure(
                {title: rows for title, (_, rows) in boards.items()}
            )
            imagenet = self.results / "imagenet.md"
            return {
                self.results / "leaderboard.md": leaderboard_page(
                    boards, self.methods.parent
                ),
                imagenet: imagenet_page(
                    imagenet.read_text(encoding="utf-8"),
                    records["leaderboard-imagenet"],
                ),
                self.results.parent / "images/leaderboard.svg": figure,
            }
        recorded = {
            grid: read_settings(some, roles[grid]) for grid, some in records.items()
        }
        first = GRIDS[page][0]
        if not recorded[first]:
            raise UserError(
                f"no records in {self.records(first)}: `{COMMAND} {page} --run` makes "
                "them; start it in a clone of the repository"
            )
        if page == "headline":
            headline = read_headline(
                records["leaderboard-imagenet"],
                records["leaderboard-real"],
                roles["leaderboard-real"],
            )
            table = headline_table(headline, read_costs(self.results))
            readme = self.readme.read_text(encoding="utf-8")
            picture = self.results.parent / "images/headline.svg"
            return {
                self.readme: insert_headline(readme, table),
                picture: headline_picture(headline),
            }
        if page == "ablation":
            text = ablation_page(
                [s for settings in recorded.values() for s in settings]
            )
            return {self.results / "ablation.md": text}
        streams = [*recorded["streams"], *recorded["streams-real"]]
        bundled = [*recorded["bundled"], *recorded["methods"]]
        text = methods_page(bundled, recorded["real"], streams, self.methods.parent)
        return {self.methods: text}

    def _published(self, records: Sequence[Record]) -> dict[Path, str]:
        """The page of published numbers, with our own on ImageNet."""
        from benchmarks.results import printed_page

        path = self.results / "published.md"
        printed = printed_page.read_printed(self.results / printed_page.PRINTED)
        section = printed_page.printed_section(printed, records)
        before = path.read_text(encoding="utf-8")
        return {
            path: printed_page.insert_between(before, "imagenet", "published", section)
        }
