"""The sections of a report: results, each dataset, settings, how to repeat."""

import json
import re
import statistics
from collections.abc import Sequence
from functools import partial

from cliquetta.evaluation.ablation import Curve
from cliquetta.evaluation.comparison import MARKS, Cell, compare, grouped
from cliquetta.evaluation.metric_table import METRICS
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
_CHANGED = 4  # methods whose changed predictions are shown
_FOLDED = 8  # runs up to which commands are shown without a click


def slug(text: str) -> str:
    """Make a name for ids and files."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def results(runs: Sequence[ReportedRun]) -> str:
    """Render one row per dataset and method, seeds together."""
    comparison = compare(runs, split=True)
    rows = [_result_row(cell) for cell in comparison.cells.values()]
    columns = (
        "dataset",
        "method",
        "seeds",
        METRICS["top1"].heading,
        "vs zero_shot",
        "wrong → right",
        "right → wrong",
        "p",
        METRICS["ece"].heading,
        "images/s",
    )

    notes = [f"{mark} {MARKS[mark]}" for mark in comparison.marks]
    if any(cell.better for cell in comparison.cells.values()):
        notes.append(
            "▲ ▼ differs from zero_shot beyond chance (exact paired test, p < 0.05)"
        )
    note = f'<p class="note">{esc("; ".join(notes))}.</p>' if notes else ""
    return table(columns, rows, labels=2, caption="All runs, seeds together") + note


def _result_row(cell: Cell) -> list[str]:
    """Write a method on a dataset: accuracy, the paired test, calibration, speed."""
    accuracy = number(cell.mean)
    if cell.sd is not None:
        accuracy += f" ± {number(cell.sd)}"
    repaired = broken = p = "–"
    if cell.test:
        repaired = f"{cell.test.repaired:,}"
        broken = f"{cell.test.broken:,}"
        p = f"{cell.test.p:.2g}"
    rates = [run.record.throughput.get("images_per_second", 0.0) for run in cell.runs]
    rate = statistics.mean(rates)
    return [
        cell.column,
        f"{cell.row} {cell.marks}".strip(),
        str(len(cell.runs)),
        accuracy,
        f"{number(cell.gain, signed=True)} {cell.better}".strip(),
        repaired,
        broken,
        p,
        number(cell.ece),
        number(rate, 1 if rate < 10 else 0),
    ]


def headline(runs: Sequence[ReportedRun]) -> str:
    """Render headline numbers: what one method changed, or how often each of a few is right.

    All seeds count, as in the table below. Nothing for many methods, or where not all
    of them saw the same images.
    """
    streams = _compared_streams(runs)
    if not streams:
        return ""
    plain, *methods = streams[0]  # zero-shot is first
    if len(methods) > _CARDS or any(
        each.keys() != streams[0].keys() for each in streams
    ):
        return ""
    if not all((run.labels >= 0).any() for each in streams for run in each.values()):
        return ""

    # Accuracy of every method over all seeds, and what each changed.
    entries = []
    for name in streams[0]:
        accuracy = _right([each[name] for each in streams])
        entries.append((accuracy, f"right with {name}"))
    counts = {}
    for method in methods:
        pairs = [(each[plain], each[method]) for each in streams]
        counts[method] = changes.count_changes(pairs)

    if len(counts) > 1:
        html = cards(entries)
        if len(streams) > 1:  # the section of a single stream says the same
            for method, counted in counts.items():
                html += f"<p>{esc(changes.in_words(counted, method))}</p>"
        return html
    (counted,) = counts.values()
    assert counted.test is not None
    changed = f"{counted.changed:,}"
    entries.append((changed, f"of {counted.images:,} predictions changed"))
    entries.append((f"{counted.test.repaired:,}", "from wrong to right"))
    entries.append((f"{counted.test.broken:,}", "from right to wrong"))
    return cards(entries)


def _compared_streams(runs: Sequence[ReportedRun]) -> list[dict[str, Predictions]]:
    """Return predictions by method, zero-shot first, for every seed and dataset with both."""
    streams = []
    for members in grouped(runs, lambda run: run.record.seed).values():
        for group in shown_groups(members):
            if group.baseline and group.adapted:
                streams.append({run.name: run.predictions for run in group.runs})
    return streams


def _right(streams: Sequence[Predictions]) -> str:
    """Share of correct predictions among the labelled images of all streams."""
    labelled = 0
    correct = 0
    for predictions in streams:
        labelled += int((predictions.labels >= 0).sum())
        correct += int(predictions.correct.sum())
    return f"{100 * correct / labelled:.1f} %"


def group_section(group: RunGroup, figures: PageFigures, *, draw: bool) -> str:
    """Render the section of one stream of images; ``draw`` says whether with figures."""
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
        parts.append(_stream(group, figures, name))
        parts.append(_reliability(group, figures, name))
    if base is not None:
        for run in group.adapted[:_CHANGED]:
            parts.append(_changed(base, run, group.labels[run.id], figures))
    return "".join(parts)


def _stream(group: RunGroup, figures: PageFigures, name: str) -> str:
    """Render the figure of accuracy over the stream."""
    ends = {}
    for run in group.runs:
        ends[group.labels[run.id]] = stream.accuracy_so_far(run.predictions)[-1]
    at_end = ", ".join(f"{label} {value:.1f} %" for label, value in ends.items())
    alt = f"Accuracy over the stream; at its end {at_end}"
    caption = "Share of correct predictions up to each image."
    if group.baseline is not None and group.adapted:
        caption += " Below, correct predictions more (or fewer) than zero_shot so far."
    if stream.dataset_changes(group.runs[0]):
        caption += " Dotted lines: another dataset begins."
    draw = partial(stream.stream_figure, group)
    figure = figures.add(f"stream-{name}", draw, alt, caption)
    return f"<h3>Accuracy over the stream</h3>{figure}"


def _reliability(group: RunGroup, figures: PageFigures, name: str) -> str:
    """Render the figure of calibration, a panel per run."""
    errors = []
    for run in group.runs:
        errors.append(f"{group.labels[run.id]} {number(run.metric('ece'), 1)} %")
    alt = f"Reliability diagrams; expected calibration error {', '.join(errors)}"
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
    """Render predictions that a run changed: a table of moves, with labels beside a figure."""
    moves = changes.moves(base.predictions, run.predictions)
    if not moves:
        return ""
    rows = []
    for move in moves[:_MOVES]:
        words = f"{run.class_name(move.before)} → {run.class_name(move.after)}"
        repaired = f"{move.repaired:,}" if run.labelled else "–"
        broken = f"{move.broken:,}" if run.labelled else "–"
        rows.append((words, f"{move.count:,}", repaired, broken))
    columns = ("prediction, before → after", "images", "now right", "now wrong")
    caption = f"Most frequent of {count(len(moves), 'move')}"
    listed = table(columns, rows, caption=caption)
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
    """Render settings that were varied."""
    parts = []
    for curve in curves:
        points = [f"{point.value}: {point.mean:.1f} %" for point in curve.points]
        values = ", ".join(points)
        about = curve.points[0].records[0]
        words = curve.field.replace("_", " ")
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
    """Render command, config and machine of every run; many of them folded away."""
    parts = []
    for run in runs:
        line, remarks = repeat_command(run.record)
        command = f"<pre><code>{esc(line)}</code></pre>"
        for remark in remarks:
            command += f'<p class="note">{esc(remark)}</p>'
        settings = _settings(run)
        if len(runs) > _FOLDED:
            parts.append(details(run.id, command + settings))
        else:
            folded = details("Settings and machine", settings)
            parts.append(f"<h3>{esc(run.id)}</h3>{command}{folded}")
    return "".join(parts)


def _settings(run: ReportedRun) -> str:
    """Render tables of what a run was, on which machine, and of the fields of its config."""
    record = run.record
    memory = []
    for kind, size in record.peak_memory.items():
        memory.append(f"{kind} {size / 2**20:,.0f} MiB")
    versions = []
    for package, version in record.environment.get("versions", {}).items():
        versions.append(f"{package} {version}")
    model = record.settings["model"]
    facts = [
        ("images", f"{record.images:,}"),
        ("files skipped", f"{len(record.skipped):,}"),
        ("weights", f"{model['id']} {model['fingerprint']}"),
        ("started, finished", f"{record.started}, {record.finished}"),
        ("seconds of prediction", number(record.throughput.get("seconds"), 1)),
        ("peak memory", ", ".join(memory)),
        ("device", str(record.environment.get("device_name", ""))),
        ("versions", ", ".join(versions)),
    ]

    config = []
    for key, value in record.settings["config"].items():
        config.append((key, json.dumps(value)))
    html = table(("fact", "value"), facts, labels=2)
    if not config:
        return f"{html}<p>No settings.</p>"
    return html + table(("setting", "value"), config, labels=2)
