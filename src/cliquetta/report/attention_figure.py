"""The figure of attention maps: plain CLIP, each clique's prompt, all prompts together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from cliquetta.evaluation.evidence_log import Evidence
from cliquetta.model.attention import Kind, patch_grid
from cliquetta.report.style import (
    DIVERGING,
    FAINT,
    SEQUENTIAL,
    Axes,
    Figure,
    new_figure,
)

_SIDE = 96  # pixels of an overlay
_COLUMNS = 6  # maps of one image: plain, up to four cliques, together
_STEP, _BLOCK = (
    1.14,
    2.74,
)  # from column to column, from image to image, in sides of a picture


@dataclass(frozen=True, eq=False)
class ImageMaps:
    """One image with its maps."""

    picture: npt.NDArray[np.uint8]  # (s, s, 3)
    title: str
    maps: npt.NDArray[np.float32]  # (R, 1 + T): plain, cliques, together
    cliques: tuple[tuple[str, int], ...]  # class and size of each clique


def image_maps(
    evidence: Evidence, names: Sequence[str], limit: int, kind: Kind = "class"
) -> list[ImageMaps]:
    """The first ``limit`` images with maps, from the batches in turn."""
    queues = [[(batch, entry) for entry in batch.maps] for batch in evidence.batches]
    turns = chain.from_iterable(zip_longest(*queues))
    images = []
    for batch, entry in [pair for pair in turns if pair is not None][:limit]:
        cliques = [] if batch.description is None else batch.description["cliques"]
        before, after = (
            names[batch.before[entry.index]],
            names[batch.after[entry.index]],
        )
        label = batch.labels[entry.index]
        prediction = before if before == after else f"{before} → {after}"
        truth = f"{names[label]}\n" if label >= 0 else ""
        images.append(
            ImageMaps(
                batch.pictures[entry.index],
                f"{truth}{prediction}",
                entry.maps[kind],
                tuple(
                    (names[cliques[id]["class"]], cliques[id]["size"])
                    for id in entry.cliques
                ),
            )
        )
    return images


def attention_figure(images: Sequence[ImageMaps]) -> Figure:
    """Two rows an image: its maps on one scale, and how each differs from plain CLIP's."""
    width, height = (_COLUMNS + 1) * _STEP, len(images) * _BLOCK
    # One pair of axes for all pictures: laying out dozens takes longer than the run.
    with new_figure(1.06 * width, 1.06 * height) as figure:
        axes = figure.subplots()
        axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
        axes.set_axis_off()
        for turn, image in enumerate(images):
            _draw(axes, turn * _BLOCK, image)
    return figure


def _draw(axes: Axes, top: float, image: ImageMaps) -> None:
    """One image with its two rows of maps, from ``top`` downwards."""
    grids = patch_grid(torch.from_numpy(image.maps)).numpy()
    brightest = float(grids.max())
    titles = [
        "plain CLIP",
        *(f"{name} ×{size}" for name, size in image.cliques),
        "all prompts",
    ]
    # "all prompts" stands in the last column, whatever the number of cliques.
    columns = [*range(1, len(grids)), _COLUMNS]
    upper, lower = top + 0.36, top + 1.62
    _show_picture(axes, 0, upper, image.picture, image.title)
    note = "less and more\nthan plain CLIP,\neach on its\nown scale"
    axes.text(
        1.0, lower + 0.5, note, ha="right", va="center", fontsize=7.5, color=FAINT
    )
    for column, grid, title in zip(columns, grids, titles, strict=True):
        _show_picture(
            axes, column, upper, overlay(image.picture, grid / brightest), title
        )
        if column > 1:
            shift = grid - grids[0]
            most = max(float(np.abs(shift).max()), 1e-12)
            moved = f"{100 * np.abs(shift).sum() / 2:.2g} % moved"
            _show_picture(
                axes, column, lower, shift, moved, cmap=DIVERGING, vmin=-most, vmax=most
            )


def _show_picture(
    axes: Axes,
    column: int,
    top: float,
    picture: npt.NDArray[Any],
    title: str,
    **look: Any,
) -> None:
    """A picture of side 1 in a column, with its title above it."""
    left = column * _STEP
    extent = (left, left + 1, top + 1, top)
    axes.imshow(picture, extent=extent, interpolation="none", **look)
    axes.text(left + 0.5, top - 0.05, title, ha="center", va="bottom", fontsize=8)


def overlay(
    picture: npt.NDArray[np.uint8], heat: npt.NDArray[np.float32]
) -> npt.NDArray[np.uint8]:
    """A picture in grey under a map with values in [0, 1]; the brighter, the more attention."""
    from matplotlib import colormaps

    size = (_SIDE, _SIDE)
    grey = Image.fromarray(picture).convert("L").resize(size, Image.Resampling.BICUBIC)
    smooth = Image.fromarray(heat.astype(np.float32)).resize(
        size, Image.Resampling.BILINEAR
    )
    colour = colormaps[SEQUENTIAL](np.clip(np.asarray(smooth), 0, 1))[:, :, :3]
    light = np.asarray(grey, np.float32)[:, :, None] / 255
    mixed = 0.38 * light + 0.62 * colour
    return np.asarray((255 * np.clip(mixed, 0, 1)).round(), np.uint8)
