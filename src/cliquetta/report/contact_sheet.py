"""Predictions to look at: a page of thumbnails, with class and probability."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cliquetta.data.images import ImageError
from cliquetta.data.remote import open_listed
from cliquetta.report.gallery import data_uri
from cliquetta.report.markup import count, esc, frame

MOST = 1000  # thumbnails on a page
_SIDE = 128


def contact_sheet(rows: Sequence[Mapping[str, Any]], methods: Sequence[str] = ("",)) -> str:
    """A page of the images of :attr:`PredictionRun.rows`, to be filtered by class.

    Args:
        rows: Path, predictions and error of every image. The first :data:`MOST` that could be read
            are shown; all others are listed.
        methods: Names of the methods where there are several; the first one's classes are filtered.

    Returns:
        HTML in one file that fetches nothing and runs no script.

    """
    heads = [f"{name}_" if name else "" for name in methods]
    read = [row for row in rows if not row["error"]]
    shown, classes = read[:MOST], Counter(row[f"{heads[0]}prediction"] for row in read[:MOST])
    indices = {name: index for index, (name, _) in enumerate(classes.most_common())}
    tiles = "".join(_tile(row, heads, indices[row[f"{heads[0]}prediction"]]) for row in shown)
    choices = {"all": f"all ({len(shown):,})"}
    choices |= {str(index): f"{name} ({classes[name]:,})" for name, index in indices.items()}
    buttons = "".join(
        f'<label><input type="radio" name="class" id="show-{id}"{" checked" * (id == "all")}> '
        f"{esc(words)}</label>"
        for id, words in choices.items()
    )
    # the choice is made by style rules, one per class: the page needs no script
    rules = "".join(
        f"body:has(#show-{index}:checked) .tile:not(.c{index}){{display:none}}\n"
        for index in indices.values()
    )
    sections = [("Predictions", f'<p class="choices">{buttons}</p><ul class="tiles">{tiles}</ul>')]
    notes = []
    if len(shown) < len(read):
        notes.append(f"The first {len(shown):,} of {len(read):,} images are shown.")
    damaged = [row for row in rows if row["error"]]
    if damaged:
        items = "".join(f"<li>{esc(row['path'])}: {esc(row['error'])}</li>" for row in damaged)
        sections.append(("Images that could not be read", f"<ul>{items}</ul>"))
    lead = f"{count(len(rows), 'image')}, {len(damaged):,} of them unreadable."
    maker = "cliquetta predict --page"
    return frame("Predictions", lead, sections, notes, style=rules, maker=maker)


def _tile(row: Mapping[str, Any], heads: Sequence[str], index: int) -> str:
    lines = ""
    for head in heads:
        who = f"{head[:-1]}: " if head else ""
        prediction, percent = row[f"{head}prediction"], 100 * float(row[f"{head}probability"])
        lines += f'<span class="prediction">{esc(f"{who}{prediction} {percent:.0f} %")}</span>'
    path = str(row["path"])
    try:
        picture = open_listed(path, shorter=_SIDE)
        picture.thumbnail((_SIDE, _SIDE))
        drawn = f'<img src="{data_uri(np.asarray(picture))}" alt="{esc(path)}">'
    except ImageError:  # a member of a tar file has no path of its own
        drawn = '<span class="note">no picture</span>'
    name = path.replace("\\", "/").rpartition("/")[2]
    shown = f"{drawn}{lines}<span>{esc(name)}</span>"
    return f'<li class="tile c{index}" title="{esc(path)}">{shown}</li>'
