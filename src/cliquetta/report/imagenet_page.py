"""The page of ImageNet and its 15 corruptions, and of what SCAP's parts bring there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cliquetta.data.corruptions import CORRUPTIONS, parse_dataset_id
from cliquetta.evaluation.comparison import Comparison, Overall, compare
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.record import Record, Run
from cliquetta.evaluation.tables import TextTable, signed, to_markdown
from cliquetta.report import results_pages as pages
from cliquetta.report.printed_page import insert_between, recorded_line

OFFICIAL = [name for name, one in CORRUPTIONS.items() if one.group not in ("rendering", "hub")]
"""The 15 corruptions of ImageNet-C, in the order of its paper."""
NOTHING = "**Not recorded yet.**"
ALL_IMAGES = "imagenet"
CLEAN = "clean"


@dataclass(frozen=True)
class Part:
    """One setting of SCAP, as the page names it: the fields of a run's config that tell it."""

    name: str
    preset: str
    config: Mapping[str, object]


WIDE = {"view_zoom": 1.142857}
PARTS = (
    Part("64 views, no clique (*none*)", "paper-views", {**WIDE, "threshold": 2.0}),
    Part(
        "and cliques (*image*)",
        "paper-views",
        {**WIDE, "threshold": 0.8, "retention": False},
    ),
    Part(
        "and retention (*image + retention*)",
        "paper-views",
        {**WIDE, "threshold": 0.8, "retention": True},
    ),
    Part("`paper-views` (crops of ImageNet-A's zoom)", "paper-views", {"retention": True}),
    Part("`released`", "released", {}),
)


def imagenet_page(page: str, records: Sequence[Record]) -> str:
    """Put the tables of the board's records between the marks of the page."""
    tables = {"corruptions": NOTHING, "scap": NOTHING, "recorded": NOTHING}
    if records:
        tables["corruptions"] = corruption_table(records)
        tables["scap"] = "\n\n".join(filter(None, [scap_table(records), scap_single_view(records)]))
        tables["recorded"] = recorded_line(records)
    for name, text in tables.items():
        page = insert_between(page, name, "leaderboard", text)
    return page


def corruption_table(records: Sequence[Record]) -> str:
    """Methods by corruptions: accuracy, mean and gain."""
    table = compare(_on_all_images(records))
    columns = {_shift(column): column for column in table.columns}
    shifts = [name for name in OFFICIAL if name in columns]
    rows = [table.overall(row, [columns[name] for name in shifts]) for row in _own_rows(table)]
    ordered = sorted(rows, key=_rank)
    head = ("method", "gain", "mean", CLEAN, *(name.replace("_", " ") for name in shifts))
    lines = []
    for row in ordered:
        names = [CLEAN, *shifts]
        cells = [table.cells.get((row.row, columns.get(name, ""))) for name in names]
        shown = [pages.BLANK if c is None else pages.shown(c.mean, ".1f") for c in cells]
        mean = pages.shown(row.mean, ".2f")
        if not row.complete:
            mean += f" ({row.datasets})"
        lines.append((f"`{pages.method_of(row.row)}`", _gain(row), mean, *shown))
    return to_markdown(TextTable(head, tuple(lines))).rstrip()


def _on_all_images(records: Sequence[Record]) -> list[Run]:
    """Runs over all images of one corruption, or the clean ones, in random order."""
    runs = []
    for record in records:
        stream = record.settings["stream"]
        usual = stream["order"] == "shuffled" and stream["batch_size"] in (20, 64)
        whole = stream["limit"] is None and _folder(record.dataset) == ALL_IMAGES
        if usual and whole and stream["views"] is None:
            runs.append(Run(record, None))
    return runs


def _own_rows(table: Comparison) -> list[str]:
    """Rows of the table, zero-shot once: its batch size changes nothing."""
    rows = list(table.rows)
    plain = [row for row in rows if pages.method_of(row) == BASELINE]
    most = max(plain, key=lambda row: sum((row, c) in table.cells for c in table.columns))
    return [row for row in rows if row not in plain or row == most]


def _rank(row: Overall) -> tuple[bool, bool, float]:
    return pages.method_of(row.row) != BASELINE, not row.complete, -(row.mean or 0.0)


def _gain(row: Overall) -> str:
    if row.gain is None:
        return pages.BLANK
    spread = "" if row.half_width is None else f" ± {row.half_width:.2f}"
    return f"{signed(row.gain)}{spread}"


def _folder(dataset: str) -> str:
    """Name of the folder of a dataset of one tar, without its shift."""
    return dataset.partition("@")[0].rpartition("/")[2]


def _shift(dataset: str) -> str:
    """Name of the shift of a dataset, or ``clean``."""
    shift = parse_dataset_id(dataset)[1]
    return CLEAN if shift is None else shift.name


def scap_table(records: Sequence[Record]) -> str:
    """SCAP's parts by shifts, each with its change from the row above."""
    plain: dict[str, float] = {}
    found: dict[str, dict[str, float]] = {part.name: {} for part in PARTS}
    for record in records:
        stream = record.settings["stream"]
        if stream["limit"] != 512 or not _folder(record.dataset).startswith("imagenet-report"):
            continue
        top1 = float(record.metrics["top1"])
        if record.method == BASELINE:
            plain[_shift(record.dataset)] = top1
        part = scap_part(record)
        if part is not None:
            found[part.name][_shift(record.dataset)] = top1
    shifts = [name for name in (CLEAN, *OFFICIAL) if name in plain]
    head = ("", *(name.replace("_", " ") for name in shifts), "mean of corruptions")
    means = [plain[name] for name in shifts if name != CLEAN]
    first = ("zero-shot, one view", *(f"{plain[s]:.1f}" for s in shifts), f"{_mean(means):.1f}")
    lines = [first]
    above: dict[str, float] = plain
    for part in PARTS:
        own = found[part.name]
        by_parts = part.name.startswith(("64 views", "and "))
        cells = [_change(own.get(s), plain[s], above.get(s), in_turn=by_parts) for s in shifts]
        corrupted = [s for s in shifts if s != CLEAN and s in own]
        average = pages.BLANK
        if corrupted:
            average = _change(
                _mean([own[s] for s in corrupted]),
                _mean([plain[s] for s in corrupted]),
                _mean([above.get(s, plain[s]) for s in corrupted]),
                in_turn=by_parts,
            )
        lines.append((part.name, *cells, average))
        if by_parts:
            above = own
    return to_markdown(TextTable(head, tuple(lines))).rstrip()


def scap_part(record: Record) -> Part | None:
    """Tell which of the page's settings a run of SCAP has."""
    if record.method != "scap":
        return None
    config = record.settings["config"]
    wide = abs(float(config["view_zoom"]) - WIDE["view_zoom"]) < 1e-3
    for part in PARTS:
        same = all(config[name] == value for name, value in part.config.items())
        if record.preset == part.preset and same and wide == ("view_zoom" in part.config):
            return part
    return None


def _change(own: float | None, plain: float, above: float | None, *, in_turn: bool) -> str:
    """A gain over zero-shot, and the change from the row above where that is a smaller method."""
    if own is None:
        return pages.BLANK
    text = f"{signed(own - plain, 1)}"
    if in_turn and above is not None and above != plain:
        text += f" ({signed(own - above, 1)})"
    return text


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def scap_single_view(records: Sequence[Record]) -> str:
    """Say what SCAP as printed, with one view, changes over all images."""
    runs = [run for run in _on_all_images(records) if run.record.method == "scap"]
    if not runs:
        return ""
    counts = [run.record.metrics for run in runs if "repaired" in run.record.metrics]
    repaired = sum(int(metrics["repaired"]) for metrics in counts)
    broken = sum(int(metrics["broken"]) for metrics in counts)
    images = sum(run.record.images for run in runs)
    return pages.fill(
        f"Preset `paper` with one view, over {images:,} images ({len(runs)} streams): {repaired:,} "
        f"predictions become right and {broken:,} wrong, "
        f"{signed(100 * (repaired - broken) / images)} points."
    )
