"""Evidence and pictures of the web app: cliques, attention over an image, curves over batches."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from cliquetta.methods.base import Adapter
from cliquetta.methods.building.explanation import CacheCount, VisuallyPrompted
from cliquetta.methods.scap.evidence import describe
from cliquetta.model.attention import Kind, difference, patch_grid, prompted_maps
from cliquetta.model.vision import VisionTower
from cliquetta.report.attention_figure import overlay
from cliquetta.report.gallery import data_uri
from cliquetta.report.style import BASELINE_LOOK, line_look, new_figure, to_file
from cliquetta.types import Prediction

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


def clique_description(prediction: Prediction) -> dict[str, Any] | None:
    """Cliques and passes as plain values; ``None`` for a method that forms no cliques."""
    if "cliques" not in prediction.evidence:
        return None
    return describe(prediction)


@dataclass(frozen=True)
class AttentionMap:
    """Attention of the class token in one pass over an image."""

    title: str
    grid: npt.NDArray[np.float32]
    """(g, g), what goes to each patch."""
    to_prompts: float
    """Share of the attention that goes to prompts."""
    moved: float
    """Share of the attention that differs from plain CLIP's."""


def attention_maps(
    adapter: Adapter, pixels: Tensor, prediction: Prediction, row: int, kind: Kind
) -> list[AttentionMap]:
    """Maps of image ``row`` of a batch: plain CLIP, then every pass that was scored with prompts.

    Empty for a model whose attention cannot be read.
    """
    tower = adapter.model.visual
    if not isinstance(tower, VisionTower):
        return []
    image = pixels[row].to(adapter.model.device)
    prompts = torch.zeros(0, 1, 1, 2, tower.config.width, device=tower.position.device)
    titles, chosen = ["plain CLIP"], torch.zeros(1, 0)
    blocks: Sequence[int] = (len(tower.blocks) - 1,)
    passes = None
    if isinstance(adapter, VisuallyPrompted):
        passes = adapter.prompted_passes(prediction, row)
    if passes is not None:
        titles, prompts, blocks = titles + list(passes.titles), passes.prompts, passes.blocks
        chosen = torch.cat([torch.zeros(1, passes.used.shape[1]), passes.used.cpu()])
    shown = prompted_maps(tower, image, prompts, blocks, chosen.bool())[kind].float().cpu()
    columns = patch_grid(shown).numpy(), shown[:, 0].tolist(), difference(shown, shown[:1]).tolist()
    return [AttentionMap(*values) for values in zip(titles, *columns, strict=True)]
