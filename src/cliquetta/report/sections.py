"""The sections of a report: results, each dataset, settings, how to repeat."""

import json
import re
import statistics
from collections.abc import Sequence
from functools import partial

from cliquetta.evaluation.ablation import Curve
from cliquetta.evaluation.comparison import MARKS, Cell, compare, grouped
from cliquetta.evaluation.grid import BASELINE
from cliquetta.evaluation.predictions import Predictions
from cliquetta.report import changes, stream
from cliquetta.report.curves import curve_figure
from cliquetta.report.markup import (
    PageFigures,
    cards,
    count,
    details,
    esc,
    number,
    table,
)
from cliquetta.report.repeat import repeat_command
from cliquetta.report.runs import ReportedRun, RunGroup, shown_groups

_MOVES = 8  # moves between classes in the table
_CARDS = 4  # methods whose figures head a page
_FOLDED = 8  # runs up to which commands are shown without a click


def slug(text: str) -> str:
    """A name for ids and files."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def results(runs: Sequence[ReportedRun]) -> str:
    """One row per dataset and method, seeds together."""
    comparison = compare(runs, split=True)
    rows = [_result_row(cell) for cell in comparison.cells.values()]
    columns = ("dataset", "method", "seeds", "top-1 %", "vs zero_shot", "wrong → right",
               "right → wrong", "p", "ECE %", "images/s")  # fmt: skip
    notes = [f"{mark} {MARKS[mark]}" for mark in comparison.marks]
    if any(cell.better for cell in comparison.cells.values()):
        notes.append(
            "▲ ▼ differs from zero_shot beyond chance (exact paired test, p < 0.05)"
        )
    note = f'<p class="note">{esc("; ".join(notes))}.</p>' if notes else ""
    return table(columns, rows, labels=2, caption="All runs, seeds together") + note


def _result_row(cell: Cell) -> list[str]:
    test = cell.test
    tested = (
        [f"{test.repaired:,}", f"{test.broken:,}", f"{test.p:.2g}"]
        if test
        else ["–"] * 3
    )
    rate = statistics.mean(
        r.record.throughput.get("images_per_second", 0.0) for r in cell.runs
    )
    return [
        cell.column,
        f"{cell.row} {cell.marks}".strip(),
        str(len(cell.runs)),
        number(cell.mean) + ("" if cell.sd is None else f" ± {number(cell.sd)}"),
        f"{number(cell.gain, signed=True)} {cell.better}".strip(),
        *tested,
        number(cell.ece),
        number(rate, 1 if rate < 10 else 0),
    ]


def headline(runs: Sequence[ReportedRun]) -> str:
    """The figures to read first: of one method what it changed, of a few how often each is right.

    All seeds count, as in the table below. Nothing for many methods, or where not all
    of them saw the same images.
    """
    streams = [
        {run.name: run.predictions for run in group.runs}  # zero-shot first
        for members in grouped(runs, lambda run: run.record.seed).values()
        for group in shown_groups(members)
        if group.baseline and group.adapted
    ]
    plain, *methods = streams[0] if streams else (BASELINE,)
    if not 1 <= len(methods) <= _CARDS or any(
        each.keys() != streams[0].keys() for each in streams
    ):
        return ""
    if not all((run.labels >= 0).any() for each in streams for run in each.values()):
        return ""
    entries = [
        (_right([each[m] for each in streams]), f"right with {m}") for m in streams[0]
    ]
    pairs = [[(each[plain], each[method]) for each in streams] for method in methods]
    counts = [changes.count_changes(pair) for pair in pairs]
    if len(counts) > 1:
        # On one stream of images its own section says the same.
        words = map(changes.in_words, counts, methods) if len(streams) > 1 else ()
        return cards(entries) + "".join(f"<p>{esc(sentence)}</p>" for sentence in words)
    test = counts[0].test
    assert test is not None
    entries.append(
        (f"{counts[0].changed:,}", f"of {counts[0].images:,} predictions changed")
    )
    entries.append((f"{test.repaired:,}", "from wrong to right"))
    entries.append((f"{test.broken:,}", "from right to wrong"))
    return cards(entries)


def _right(streams: Sequence[Predictions]) -> str:
    """Share of correct predictions among the labelled images of all streams."""
    known = sum(int((each.labels >= 0).sum()) for each in streams)
    return f"{100 * sum(int(each.correct.sum()) for each in streams) / known:.1f} %"


def group_section(group: RunGroup, figures: PageFigures, *, draw: bool) -> str:
    """The section of one stream of images; ``draw`` says whether with figures."""
    parts = []
    base = group.baseline
    if base is not None:
        for run in group.adapted:
            counted = changes.count_changes([(base.predictions, run.predictions)])
            parts.append(
                f"<p>{esc(changes.in_words(counted, group.labels[run.id]))}</p>"
            )
    elif group.adapted:
        reason = "No zero_shot run over these images was given, so gains are unknown."
        parts.append(f'<p class="note">{reason}</p>')
    if not draw or not len(group.runs[0].predictions):
        return "".join(parts)
    if group.runs[0].labelled:
        name = f"{slug(group.dataset)}-{group.runs[0].id[-10:]}"
        parts += [_stream(group, figures, name), _reliability(group, figures, name)]
    if base is not None:
        own = group.adapted[:4]
        parts += [_changed(base, run, group.labels[run.id], figures) for run in own]
    return "".join(parts)


def _stream(group: RunGroup, figures: PageFigures, name: str) -> str:
    ends = {
        group.labels[run.id]: stream.accuracy_so_far(run.predictions)[-1]
        for run in group.runs
    }
    alt = "Accuracy over the stream; at its end " + ", ".join(
        f"{label} {value:.1f} %" for label, value in ends.items()
    )
    caption = "Share of correct predictions up to each image."
    if group.baseline is not None and group.adapted:
        caption += " Below, correct predictions more (or fewer) than zero_shot so far."
    if stream.dataset_changes(group.runs[0]):
        caption += " Dotted lines: another dataset begins."
    figure = figures.add(
        f"stream-{name}", lambda: stream.stream_figure(group), alt, caption
    )
    return f"<h3>Accuracy over the stream</h3>{figure}"


def _reliability(group: RunGroup, figures: PageFigures, name: str) -> str:
    alt = "Reliability diagrams; expected calibration error " + ", ".join(
        f"{group.labels[run.id]} {number(run.metric('ece'), 1)} %" for run in group.runs
    )
    caption = (
        "How often predictions of a confidence are right; on the dashed line they would be "
        "calibrated. Hatched: the gap. Below, how many predictions have that confidence."
    )
    draw = partial(stream.reliability_figure, group)
    figure = figures.add(f"reliability-{name}", draw, alt, caption)
    return f"<h3>Calibration</h3>{figure}"


def _changed(
    base: ReportedRun, run: ReportedRun, label: str, figures: PageFigures
) -> str:
    most_frequent = changes.moves(base.predictions, run.predictions)
    if not most_frequent:
        return ""
    rows = [
        (
            f"{run.class_name(move.before)} → {run.class_name(move.after)}",
            f"{move.count:,}",
            f"{move.repaired:,}" if run.labelled else "–",
            f"{move.broken:,}" if run.labelled else "–",
        )
        for move in most_frequent[:_MOVES]
    ]
    columns = ("prediction, before → after", "images", "now right", "now wrong")
    listed = table(
        columns, rows, caption=f"Most frequent of {count(len(most_frequent), 'move')}"
    )
    heading = f"<h3>Predictions that {esc(label)} changed</h3>"
    if not run.labelled:
        return heading + listed
    matrix = changes.changed_confusion(base.predictions, run.predictions)
    caption = (
        "Images that a cell gained (+, violet) or lost (−, brown) against zero_shot, by label and "
        "prediction, for the classes whose predictions changed. Framed: correct predictions."
    )
    gained = int(matrix.difference.diagonal()[: len(matrix.classes)].sum())
    alt = f"Change of the confusion matrix by {label}: {gained:+d} correct predictions"
    draw = partial(changes.confusion_figure, matrix, run.names)
    figure = figures.add(f"confusion-{run.id}", draw, alt, caption)
    return f'{heading}<div class="pair">{figure}<div>{listed}</div></div>'


def curves_section(curves: Sequence[Curve], figures: PageFigures) -> str:
    """Settings that were varied."""
    parts = []
    for curve in curves:
        values = ", ".join(
            f"{point.value}: {point.mean:.1f} %" for point in curve.points
        )
        about, words = curve.points[0].records[0], curve.field.replace("_", " ")
        alt = f"Top-1 of {about.method} on {about.dataset} over {words}; {values}"
        caption = f"{about.method} on {about.dataset}: {words}."
        if curve.default is not None:
            caption += f" Most runs have {curve.default}; everything else as in those."
        if any(len(point.records) > 1 for point in curve.points):
            caption += " Bars: standard deviation over seeds."
        if curve.field == "batch_size":
            caption += " Largest clique: mean over batches."
        title = f"curve-{slug(about.dataset)}-{slug(about.method)}-{slug(curve.field)}"
        parts.append(figures.add(title, partial(curve_figure, curve), alt, caption))
    return f'<div class="pair">{"".join(parts)}</div>'


def repeat_section(runs: Sequence[ReportedRun]) -> str:
    """The command, the config and the machine of every run; many of them folded away."""
    parts = []
    for run in runs:
        line, remarks = repeat_command(run.record)
        notes = "".join(f'<p class="note">{esc(remark)}</p>' for remark in remarks)
        command, settings = (
            f"<pre><code>{esc(line)}</code></pre>{notes}",
            _settings(run),
        )
        shown = f"<h3>{esc(run.id)}</h3>{command}{details('Settings and machine', settings)}"
        parts.append(
            details(run.id, command + settings) if len(runs) > _FOLDED else shown
        )
    return "".join(parts)


def _settings(run: ReportedRun) -> str:
    record = run.record
    memory = [
        f"{kind} {size / 2**20:,.0f} MiB" for kind, size in record.peak_memory.items()
    ]
    versions = record.environment.get("versions", {})
    model = record.settings["model"]
    facts = [
        ("images", f"{record.images:,}"),
        ("files skipped", f"{len(record.skipped):,}"),
        ("weights", f"{model['id']} {model['fingerprint']}"),
        ("started, finished", f"{record.started}, {record.finished}"),
        ("seconds of prediction", number(record.throughput.get("seconds"), 1)),
        ("peak memory", ", ".join(memory)),
        ("device", str(record.environment.get("device_name", ""))),
        (
            "versions",
            ", ".join(f"{name} {version}" for name, version in versions.items()),
        ),
    ]
    config = [
        (key, json.dumps(value)) for key, value in record.settings["config"].items()
    ]
    listed = (
        table(("setting", "value"), config, labels=2)
        if config
        else "<p>No settings.</p>"
    )
    return table(("fact", "value"), facts, labels=2) + listed
