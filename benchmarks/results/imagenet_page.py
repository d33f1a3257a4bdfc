"""The page of ImageNet and its 15 corruptions, and of what SCAP's parts bring there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.results.texts import (
    BLANK,
    figure,
    fill,
    gain_with_interval,
    insert_between,
    method_of,
    recorded_line,
)
from cliquetta.data.corruptions import CORRUPTIONS, parse_dataset_id
from cliquetta.decimals import signed
from cliquetta.evaluation.comparison import Comparison, Overall, compare
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record, Run
from cliquetta.evaluation.tables import TextTable, to_markdown

OFFICIAL = [
    name for name, one in CORRUPTIONS.items() if one.group not in ("rendering", "hub")
]
"""The 15 corruptions of ImageNet-C, in the order of its paper."""
NOTHING = "**Not recorded yet.**"
ALL_IMAGES = "imagenet"
CLEAN = "clean"
MEAN = "mean of corruptions"
BATCH_SIZES = (20, 64)
"""Batches of the board's streams over all images: Mint's, and the others'."""
SCAP_IMAGES = 512
"""Images of a stream that SCAP saw with 64 views."""


@dataclass(frozen=True)
class Part:
    """One setting of SCAP, as the page names it, and what in a run's config tells it."""

    name: str
    preset: str
    config: Mapping[str, object]
    wide: bool = False  # crops of the zoom for ImageNet-V2 instead of ImageNet-A
    starts: bool = False  # the first of the rows that are built up
    adds: bool = False  # whether it adds something to the row above


PARTS = (
    Part(
        "64 views, no clique (*none*)",
        preset="paper-views",
        config={"threshold": 2.0},
        wide=True,
        starts=True,
    ),
    Part(
        "and cliques (*image*)",
        preset="paper-views",
        config={"threshold": 0.8, "retention": False},
        wide=True,
        adds=True,
    ),
    Part(
        "and retention (*image + retention*)",
        preset="paper-views",
        config={"threshold": 0.8, "retention": True},
        wide=True,
        adds=True,
    ),
    Part("`paper-views`", preset="paper-views", config={"retention": True}),
    Part("`released`", preset="released", config={}),
)
WIDE_ZOOM = 256 / 224


def imagenet_page(page: str, records: Sequence[Record]) -> str:
    """Put the tables of the board's records between the marks of the page."""
    tables = {"corruptions": NOTHING, "scap": NOTHING, "recorded": NOTHING}
    if records:
        tables["corruptions"] = corruption_table(records)
        parts = (scap_table(records), scap_single_view(records))
        tables["scap"] = "\n\n".join(filter(None, parts))
        tables["recorded"] = recorded_line(records)
    for name, text in tables.items():
        page = insert_between(page, name, "leaderboard", text)
    return page


def corruption_table(records: Sequence[Record]) -> str:
    """Write methods by corruptions: gain, mean, and the accuracy on each."""
    table, columns = on_all_images(records)
    corrupted = corruption_columns(columns)
    shown = [name for name in (CLEAN, *OFFICIAL) if name in columns]
    rows = [table.overall(name, corrupted) for name in own_rows(table)]
    rows.sort(key=_rank)

    lines = []
    for row in rows:
        mean = figure(row.mean, ".2f")
        if not row.complete:
            mean += f" ({row.datasets})"
        cells = []
        for name in shown:
            cell = table.cells.get((row.row, columns[name]))
            accuracy = None if cell is None else cell.mean
            cells.append(figure(accuracy, ".1f"))
        label = f"`{method_of(row.row)}`"
        lines.append((label, gain_with_interval(row), mean, *cells))
    head = ("method", "gain", "mean", *map(_in_words, shown))
    return to_markdown(TextTable(head, tuple(lines))).rstrip()


def _in_words(shift: str) -> str:
    return shift.replace("_", " ")


def on_all_images(records: Sequence[Record]) -> tuple[Comparison, dict[str, str]]:
    """Compare methods on all images, clean or under a corruption; also columns by shift."""
    table = compare(_runs_on_all_images(records))
    return table, {_shift(column): column for column in table.columns}


def corruption_columns(columns: Mapping[str, str]) -> list[str]:
    """Return the columns of the 15 corruptions, as far as they are there."""
    return [columns[name] for name in OFFICIAL if name in columns]


def _runs_on_all_images(records: Sequence[Record]) -> list[Run]:
    """Choose runs over all images of one corruption, or the clean ones, in random order."""
    runs = []
    for record in records:
        stream = record.settings["stream"]
        usual_order = stream["order"] == "shuffled"
        usual_batch = stream["batch_size"] in BATCH_SIZES
        whole = stream["limit"] is None and _folder(record.dataset) == ALL_IMAGES
        if usual_order and usual_batch and whole and stream["views"] is None:
            runs.append(Run(record, None))
    return runs


def own_rows(table: Comparison) -> list[str]:
    """Choose rows of the table, zero-shot once: its batch size changes nothing."""
    rows = []
    plain = []
    for row in table.rows:
        if method_of(row) == BASELINE:
            plain.append(row)
        else:
            rows.append(row)
    if not plain:
        return rows

    def columns_of(row: str) -> int:
        return sum((row, column) in table.cells for column in table.columns)

    return [max(plain, key=columns_of), *rows]


def _rank(row: Overall) -> tuple[bool, bool, float]:
    return method_of(row.row) != BASELINE, not row.complete, -(row.mean or 0.0)


def _folder(dataset: str) -> str:
    """Name of the folder of a dataset of one tar, without its shift."""
    return dataset.partition("@")[0].rpartition("/")[2]


def _shift(dataset: str) -> str:
    """Name of the shift of a dataset, or ``clean``."""
    shift = parse_dataset_id(dataset)[1]
    return CLEAN if shift is None else shift.name


def scap_table(records: Sequence[Record]) -> str:
    """Write SCAP's parts by shifts, each with its change from the row above."""
    plain, found = _scap_accuracies(records)
    shifts = [name for name in (CLEAN, *OFFICIAL) if name in plain]
    corruptions = [name for name in shifts if name != CLEAN]
    if not corruptions:
        return NOTHING
    _add_mean(plain, corruptions)
    columns = [*shifts, MEAN]
    lines = [("zero-shot, one view", *(f"{plain[name]:.1f}" for name in columns))]

    # Rows that add a part say what it changes beside the row above.
    above: dict[str, float] = {}
    for part in PARTS:
        own = found.get(part.name, {})
        _add_mean(own, corruptions)
        cells = []
        for name in columns:
            change = None
            if part.adds and name in own and name in above:
                change = own[name] - above[name]
            cells.append(_change(own.get(name), plain[name], change))
        lines.append((part.name, *cells))
        if part.starts or part.adds:
            above = own
    head = ("", *map(_in_words, columns))
    return to_markdown(TextTable(head, tuple(lines))).rstrip()


def _scap_accuracies(
    records: Sequence[Record],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Read accuracies by shift: of zero-shot on SCAP's images, and of SCAP's parts by name."""
    plain: dict[str, float] = {}
    found: dict[str, dict[str, float]] = {}
    for record in records:
        limited = record.settings["stream"]["limit"] == SCAP_IMAGES
        if not limited or not _folder(record.dataset).startswith("imagenet-report"):
            continue
        shift = _shift(record.dataset)
        top1 = float(record.metrics["top1"])
        part = scap_part(record)
        if record.method == BASELINE:
            plain[shift] = top1
        elif part is not None:
            found.setdefault(part.name, {})[shift] = top1
    return plain, found


def _add_mean(accuracies: dict[str, float], corruptions: Sequence[str]) -> None:
    """Add the mean over the corruptions, where all of them are there."""
    values = [accuracies[name] for name in corruptions if name in accuracies]
    if len(values) == len(corruptions):
        accuracies[MEAN] = sum(values) / len(corruptions)


def scap_part(record: Record) -> Part | None:
    """Tell which of the page's settings a run of SCAP has."""
    if record.method != "scap":
        return None
    config = record.settings["config"]
    wide = abs(float(config["view_zoom"]) - WIDE_ZOOM) < 1e-3
    for part in PARTS:
        same_config = all(config[name] == value for name, value in part.config.items())
        same_views = part.preset == record.preset and part.wide == wide
        if same_config and same_views:
            return part
    return None


def _change(own: float | None, plain: float, change: float | None) -> str:
    """Write a gain over zero-shot, and the change from the row above where it is given."""
    if own is None:
        return BLANK
    text = signed(own - plain, 1)
    if change is None:
        return text
    return f"{text} ({signed(change, 1)})"


def scap_single_view(records: Sequence[Record]) -> str:
    """Say what SCAP as printed, with one view, changes over all images."""
    streams = 0
    images = 0
    repaired = 0
    broken = 0
    for run in _runs_on_all_images(records):
        metrics = run.record.metrics
        if run.record.method == "scap" and "repaired" in metrics:
            streams += 1
            images += run.record.images
            repaired += int(metrics["repaired"])
            broken += int(metrics["broken"])
    if not streams:
        return ""

    gain = 100 * (repaired - broken) / images
    return fill(
        f"Preset `paper` with one view, over {images:,} images ({streams} streams): "
        f"{repaired:,} predictions become right and {broken:,} wrong, {signed(gain)} points."
    )
