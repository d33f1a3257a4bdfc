"""Predictions to look at: thumbnails with class and probability, to be filtered and sorted."""

import base64
import io
import json
import os
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from cliquetta.data.images import ImageError
from cliquetta.data.remote import open_listed
from cliquetta.data.workers import usable_cores
from cliquetta.inference.rows import LABEL, ZERO_SHOT, PredictionRun
from cliquetta.inference.scores import MethodScores
from cliquetta.report.markup import cards, count, details, esc, frame, number, table

MOST = 20_000  # thumbnails on a page
MANY = 2_000  # from here on thumbnails are smaller
BLOCK = 200  # thumbnails that the page reads at a time
LISTED = 1_000  # unreadable images that are listed
_SIDE = 128
_SMALL_SIDE = 96
_NO_PICTURE = "-"
_CONFUSED = 20  # rows of the table of what was confused

Rows = Sequence[Mapping[str, Any]]


def contact_sheet(run: PredictionRun, methods: Sequence[str] = ("",)) -> str:
    """Make a page of the images of a run, by class, folder, confidence and what changed.

    Args:
        run: A run that kept its rows. The first :data:`MOST` images that could be read
            are shown.
        methods: Names of the methods where there are several.

    Returns:
        HTML in one file that fetches nothing; the browser runs no script but the one in
        it.

    """
    read = [row for row in run.rows if not row["error"]]
    damaged = [row for row in run.rows if row["error"]]
    shown = read[:MOST]
    sections = []
    for name, scores in run.scores.items():
        title = f"Accuracy of {name}" if len(run.scores) > 1 else "Accuracy"
        if scores.images:
            sections.append((title, _accuracy(scores)))
    sections.append(("Predictions", _gallery(shown, methods)))
    notes = []
    if len(shown) < len(read):
        notes.append(f"The first {len(shown):,} of {len(read):,} images are shown.")
    if damaged:
        sections.append(("Images that could not be read", _list_damaged(damaged)))
    return frame(
        "Predictions",
        f"{count(len(run.rows), 'image')}, {len(damaged):,} of them unreadable.",
        sections,
        notes,
        style=_resource("contact_sheet.css"),
        script=_resource("contact_sheet.js"),
        maker="cliquetta predict --page",
    )


def _resource(name: str) -> str:
    return files("cliquetta.report").joinpath(name).read_text(encoding="utf-8")


# --- figures --------------------------------------------------------------------------------------


def _accuracy(scores: MethodScores) -> str:
    """Return figures against labels, and tables of classes and of what was confused."""
    figures = [
        (f"{number(scores.accuracy, 1)} %", f"of {count(scores.images, 'image')} right")
    ]

    test = scores.versus_zero_shot
    if test is not None:
        figures += [
            (f"{number(scores.zero_shot_accuracy, 1)} %", "zero-shot"),
            (f"{test.repaired:,}", "repaired by adapting"),
            (f"{test.broken:,}", "broken by adapting"),
            (f"{test.p:.2g}", "p of the paired test"),
        ]
    html = cards(figures)

    per_class = scores.per_class
    rows = []
    for label in sorted(per_class, key=lambda label: per_class[label].accuracy):
        score = per_class[label]
        rows.append([label, f"{score.images:,}", number(score.accuracy, 1)])
    title = f"{count(len(rows), 'class', 'classes')}, worst first"
    html += details(title, table(("class", "images", "accuracy %"), rows))

    confused = []
    for label, predicted, images in scores.mistakes[:_CONFUSED]:
        confused.append([label, predicted, f"{images:,}"])
    if confused:
        columns = ("is", "predicted as", "images")
        html += details("Confused most often", table(columns, confused, labels=2))
    return html


def _list_damaged(rows: Rows) -> str:
    items = ""
    for row in rows[:LISTED]:
        items += f"<li>{esc(row['path'])}: {esc(row['error'])}</li>"
    if len(rows) > LISTED:
        items += f"<li>and {len(rows) - LISTED:,} more</li>"
    return f"<ul>{items}</ul>"


# --- images ---------------------------------------------------------------------------------------


def _gallery(rows: Rows, methods: Sequence[str]) -> str:
    """Return controls, an empty list of tiles, and what the script fills it with."""
    sheet = _Sheet.of(rows, methods)
    legend = _legend(labelled=sheet.labelled, compared=sheet.compared)
    return (
        f'<form id="controls">{sheet.controls()}</form>'
        '<div class="turn"><button type="button" id="previous">Previous</button>'
        '<button type="button" id="next">Next</button>'
        '<span id="status" role="status"></span></div>'
        f'<p class="note">{legend}</p>'
        '<ul class="tiles" id="tiles"></ul>'
        "<noscript><p>A browser that runs scripts shows the images here.</p></noscript>"
        f'<script type="application/json" id="images">{_json(sheet.data())}</script>'
        f"{_picture_blocks(rows)}"
    )


@dataclass(frozen=True)
class _Sheet:
    """Rows of a page, and what all of them share."""

    rows: Rows
    methods: Sequence[str]  # without plain CLIP, which has columns of its own
    labelled: bool
    compared: bool  # with plain CLIP
    classes: Sequence[str]
    folders: Sequence[str]  # of every image, below the folder that all share

    @classmethod
    def of(cls, rows: Rows, methods: Sequence[str]) -> "_Sheet":
        """Read from the rows what they hold."""
        labelled = bool(rows) and LABEL in rows[0]
        compared = bool(rows) and f"{ZERO_SHOT}_prediction" in rows[0]
        if compared:
            methods = [name for name in methods if name != ZERO_SHOT]

        # Classes of all columns share one list of names, which the columns number.
        columns = [f"{_prefix(method)}prediction" for method in methods]
        if compared:
            columns.append(f"{ZERO_SHOT}_prediction")
        if labelled:
            columns.append(LABEL)
        return cls(
            rows=rows,
            methods=methods,
            labelled=labelled,
            compared=compared,
            classes=_most_frequent(rows, columns),
            folders=_folders([str(row["path"]) for row in rows]),
        )

    def data(self) -> dict[str, Any]:
        """Return what the script fills the list with: columns of numbers, one per image."""
        data: dict[str, Any] = {
            "block": BLOCK,
            "classes": self.classes,
            "methods": list(self.methods) if len(self.methods) > 1 else [""],
            "paths": [str(row["path"]) for row in self.rows],
            "predictions": [self._predictions(method) for method in self.methods],
            "probabilities": [self._probabilities(method) for method in self.methods],
        }
        folder_names = sorted(set(self.folders))
        if len(folder_names) > 1:
            data["folders"] = _numbers(self.folders, folder_names)
        if self.labelled:
            labels = [row[LABEL] for row in self.rows]
            data["labels"] = _numbers(labels, self.classes)
        if self.compared:
            data["zero_shot"] = self._predictions(ZERO_SHOT)
            data["zero_shot_probabilities"] = self._probabilities(ZERO_SHOT)
        return data

    def _predictions(self, method: str) -> list[int]:
        column = f"{_prefix(method)}prediction"
        return _numbers([row[column] for row in self.rows], self.classes)

    def _probabilities(self, method: str) -> list[float]:
        column = f"{_prefix(method)}probability"
        return [float(row[column]) for row in self.rows]

    def controls(self) -> str:
        """Render choices in the order of the page; one without an alternative is left out."""
        html = ""
        if len(self.methods) > 1:
            numbered = {str(index): name for index, name in enumerate(self.methods)}
            html += _select("method", "Method", numbered)
        orders = {"": "list", "most": "most certain", "least": "least certain"}
        html += _select("sort", "Sort by", orders)

        first = f"{_prefix(self.methods[0])}prediction"
        counted = Counter(row[first] for row in self.rows)
        predicted = [f"{name} ({counted[name]:,})" for name in self.classes]
        html += _select("predicted", "Predicted", _all_or(predicted))
        folder_names = sorted(set(self.folders))
        if len(folder_names) > 1:
            names = [name or "(top)" for name in folder_names]
            html += _select("folder", "Sub-folder", _all_or(names))
        if self.labelled:
            verdicts = {"": "all", "right": "right", "wrong": "wrong"}
            html += _select("label", "Label", _all_or(self.classes))
            html += _select("truth", "Right or wrong", verdicts)
        if self.compared:
            kinds = {"": "all", "changed": "only what adapting changed"}
            if self.labelled:
                kinds |= {"repaired": "repaired", "broken": "broken"}
            html += _select("changed", "Adapting", kinds)
        return html


def _prefix(method: str) -> str:
    """Return what the columns of a method begin with; nothing for the only one."""
    return f"{method}_" if method else ""


def _legend(*, labelled: bool, compared: bool) -> str:
    """Say what signs and frames of a picture mean."""
    parts = []
    if labelled:
        parts.append("✓ right, ✗ wrong")
    if compared and labelled:
        parts.append("green frame: adapting repaired it; dashed: adapting broke it")
    if compared:
        parts.append("dotted: adapting changed it otherwise")
    return "; ".join(parts)


def _most_frequent(rows: Rows, columns: Sequence[str]) -> list[str]:
    """Return all class names of some columns, the most frequent of the first column first."""
    names: Counter[str] = Counter()
    for column in columns:
        weight = 1 if column == columns[0] else 0
        for row in rows:
            if name := row[column]:
                names[name] += weight
    return [name for name, _ in names.most_common()]


def _numbers(names: Sequence[str], listed: Sequence[str]) -> list[int]:
    """Return the place of each name in a list, -1 where it is not there."""
    index = {name: number for number, name in enumerate(listed)}
    return [index.get(name, -1) for name in names]


def _folders(paths: Sequence[str]) -> list[str]:
    """Return the folder of each path below the folder that all of them share."""
    folders = [posixpath.dirname(path.replace("\\", "/")) for path in paths]
    try:
        shared = posixpath.commonpath(folders) if folders else ""
    except ValueError:  # some paths are absolute, some are not
        shared = ""
    return [folder.removeprefix(shared).lstrip("/") for folder in folders]


def _all_or(names: Sequence[str]) -> dict[str, str]:
    """Return options that choose one of some names, or all."""
    numbered = {str(index): name for index, name in enumerate(names)}
    return {"": "all"} | numbered


def _select(name: str, title: str, options: Mapping[str, str]) -> str:
    body = ""
    for value, words in options.items():
        body += f'<option value="{esc(value)}">{esc(words)}</option>'
    return f'<label>{esc(title)}<select name="{esc(name)}">{body}</select></label>'


def _json(data: Any) -> str:
    """Return JSON that cannot end the element that holds it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _picture_blocks(rows: Rows) -> str:
    """Return all thumbnails as lines of base64 in blocks that no browser shows or runs."""
    side = _SIDE if len(rows) <= MANY else _SMALL_SIDE

    def draw(row: Mapping[str, Any]) -> str:
        return _thumbnail(str(row["path"]), side)

    with ThreadPoolExecutor(usable_cores(), "cliquetta-page") as threads:
        pictures = list(threads.map(draw, rows))
    blocks = []
    for first in range(0, len(pictures), BLOCK):
        lines = "\n".join(pictures[first : first + BLOCK])
        name = f"pictures-{first // BLOCK}"
        blocks.append(f'<script type="text/plain" id="{name}">{lines}</script>')
    return "".join(blocks)


def _thumbnail(path: str, side: int) -> str:
    """Return a small picture as base64 of WebP; of a member of a tar file there is none."""
    try:
        picture = open_listed(os.fspath(path), shorter=side)
    except ImageError:
        return _NO_PICTURE
    picture.thumbnail((side, side))
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=75, method=4)
    return base64.b64encode(file.getvalue()).decode()
