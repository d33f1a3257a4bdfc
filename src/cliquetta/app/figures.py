"""Pictures of the web app: thumbnails, attention laid over an image, curves over the batches."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from cliquetta.app.evidence import AttentionMap
from cliquetta.methods.building.explanation import CacheCount
from cliquetta.report.attention_figure import overlay
from cliquetta.report.gallery import data_uri
from cliquetta.report.style import BASELINE_LOOK, line_look, new_figure, to_file

Picture = npt.NDArray[np.uint8]

_SIDE = 112
_CLASSES = 40
"""Rows of the figure of a cache; of longer class lists the fullest are shown."""
_BATCHES = 60
"""Columns of it: the last ones."""


def enlarged(picture: Picture, side: int = _SIDE) -> Picture:
    """A picture (S, S, 3) at the size at which it is shown."""
    image = Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(image)


def thumbnail(picture: Picture, side: int = _SIDE) -> str:
    """A picture (S, S, 3) as the address of an image on a page."""
    return data_uri(enlarged(picture, side))


def overlays(picture: Picture, maps: Sequence[AttentionMap], side: int = 192) -> list[str]:
    """The picture under each map, the brighter the more attention; one scale for all."""
    top = max((float(entry.grid.max()) for entry in maps), default=1.0) or 1.0
    return [thumbnail(overlay(picture, entry.grid / top), side) for entry in maps]


def accuracy_figure(curve: Sequence[tuple[int, float, float]], method: str) -> str:
    """Accuracy so far, over the images of the stream."""
    images, before, after = zip(*curve, strict=True)
    with new_figure(6.4, 2.6) as figure:
        axes = figure.add_subplot()
        # zero-shot is drawn on top, dashed and hollow, so that equal curves are both seen
        plain = BASELINE_LOOK | {"marker": "s", "markersize": 7, "fillstyle": "none", "zorder": 3}
        axes.plot(images, [100 * share for share in before], label="zero-shot", **plain)
        axes.plot(images, [100 * share for share in after], label=method, **line_look(0))
        axes.set_ylim(0, 105)
        axes.set_xlabel("images so far")
        axes.set_ylabel("accuracy, %")
        axes.set_xlim(left=0)
        axes.legend(loc="lower right")
        return _png(to_file(figure, "png"))


def cache_figure(history: Sequence[CacheCount], names: Sequence[str]) -> str:
    """Entries per class (rows) after each batch (columns)."""
    from matplotlib.ticker import MaxNLocator

    table = np.array([count.held for count in history[-_BATCHES:]]).T
    first = len(history) - table.shape[1] + 1
    rows = np.sort(np.argsort(-table[:, -1], kind="stable")[:_CLASSES])
    table = table[rows]
    capacity = history[-1].capacity
    with new_figure(6.4, 1.0 + 0.22 * len(rows)) as figure:
        axes = figure.add_subplot()
        axes.grid(visible=False)
        edges = (first - 0.5, first + table.shape[1] - 0.5, len(rows) - 0.5, -0.5)
        drawn = axes.imshow(table, vmin=0, vmax=capacity, aspect="auto", extent=edges)
        axes.set_yticks(range(len(rows)), [names[row] for row in rows])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("batch")
        if table.shape[1] <= 20:
            for (row, column), held in np.ndenumerate(table):
                ink = "white" if held < 0.6 * capacity else "black"
                axes.text(first + column, row, str(held), ha="center", va="center", color=ink)
        figure.colorbar(drawn, ax=axes, label=f"entries, at most {capacity}", pad=0.02)
        return _png(to_file(figure, "png"))


def cache_figures(
    history: Sequence[Mapping[str, CacheCount]], names: Sequence[str]
) -> dict[str, str]:
    """One figure per cache of the method."""
    caches = history[-1] if history else {}
    return {cache: cache_figure([then[cache] for then in history], names) for cache in caches}


def _png(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
