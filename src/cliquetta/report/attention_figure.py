"""The figure of attention maps: plain CLIP, each clique's prompt, all prompts together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from cliquetta.evaluation.evidence_log import BatchEvidence, Evidence, MapEvidence
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
# Distances in sides of a picture.
_STEP = 1.14  # from column to column
_BLOCK = 2.74  # from image to image


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
    """Return the first ``limit`` images with maps, from the batches in turn."""
    # The first image of every batch, then the second of every batch, and so on.
    turns = []
    for batch in evidence.batches:
        for turn, entry in enumerate(batch.maps):
            turns.append((turn, batch, entry))
    turns.sort(key=lambda entry: entry[0])
    return [_image_maps(batch, entry, names, kind) for _, batch, entry in turns[:limit]]


def _image_maps(
    batch: BatchEvidence, entry: MapEvidence, names: Sequence[str], kind: Kind
) -> ImageMaps:
    """Return the maps of one image, with its label, its predictions and its cliques in words."""
    before = names[batch.before[entry.index]]
    after = names[batch.after[entry.index]]
    title = before if before == after else f"{before} → {after}"
    label = batch.labels[entry.index]
    if label >= 0:
        title = f"{names[label]}\n{title}"

    described = [] if batch.description is None else batch.description["cliques"]

    # Titles name the class and the size of each clique.
    cliques = []
    for id in entry.cliques:
        clique = described[id]
        cliques.append((names[clique["class"]], clique["size"]))
    return ImageMaps(
        picture=batch.pictures[entry.index],
        title=title,
        maps=entry.maps[kind],
        cliques=tuple(cliques),
    )


def attention_figure(images: Sequence[ImageMaps]) -> Figure:
    """Draw two rows an image: its maps on one scale, and their differences from plain CLIP's."""
    width = (_COLUMNS + 1) * _STEP
    height = len(images) * _BLOCK
    # One pair of axes for all pictures: laying out dozens takes longer than the run.
    with new_figure(1.06 * width, 1.06 * height) as figure:
        axes = figure.subplots()
        axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
        axes.set_axis_off()
        for turn, image in enumerate(images):
            _draw(axes, turn * _BLOCK, image)
    return figure


def _draw(axes: Axes, top: float, image: ImageMaps) -> None:
    """Draw one image with its two rows of maps, from ``top`` downwards."""
    grids = patch_grid(torch.from_numpy(image.maps)).numpy()

    # All maps of an image have one scale, its differences one each.
    brightest = float(grids.max())
    titles = [
        "plain CLIP",
        *(f"{name} ×{size}" for name, size in image.cliques),
        "all prompts",
    ]
    # "all prompts" stands in the last column, whatever the number of cliques.
    columns = [*range(1, len(grids)), _COLUMNS]

    # The picture is on the left, its maps above, their differences below.
    upper = top + 0.36
    lower = top + 1.62
    _show_picture(axes, 0, upper, image.picture, image.title)
    note = "less and more\nthan plain CLIP,\neach on its\nown scale"
    axes.text(
        1.0, lower + 0.5, note, ha="right", va="center", fontsize=7.5, color=FAINT
    )
    for column, grid, title in zip(columns, grids, titles, strict=True):
        heat = overlay(image.picture, grid / brightest)
        _show_picture(axes, column, upper, heat, title)
        if column > 1:
            shift = grid - grids[0]
            most = max(float(np.abs(shift).max()), 1e-12)
            # What leaves one patch arrives at another: each shift is counted twice.
            moved = 100 * np.abs(shift).sum() / 2
            look = {"cmap": DIVERGING, "vmin": -most, "vmax": most}
            _show_picture(axes, column, lower, shift, f"{moved:.2g} % moved", **look)


def _show_picture(
    axes: Axes,
    column: int,
    top: float,
    picture: npt.NDArray[Any],
    title: str,
    **look: Any,
) -> None:
    """Draw a picture of side 1 in a column, with its title above it."""
    left = column * _STEP
    right = left + 1
    bottom = top + 1
    extent = (left, right, bottom, top)
    axes.imshow(picture, extent=extent, interpolation="none", **look)
    axes.text(left + 0.5, top - 0.05, title, ha="center", va="bottom", fontsize=8)


def overlay(
    picture: npt.NDArray[np.uint8], heat: npt.NDArray[np.float32]
) -> npt.NDArray[np.uint8]:
    """Lay a map with values in [0, 1] over a picture in grey; the brighter, the more attention."""
    from matplotlib import colormaps

    size = (_SIDE, _SIDE)
    grey = Image.fromarray(picture).convert("L")
    grey = grey.resize(size, Image.Resampling.BICUBIC)
    light = np.asarray(grey, np.float32)[:, :, None] / 255  # (s, s, 1)

    smooth = Image.fromarray(heat.astype(np.float32))
    smooth = smooth.resize(size, Image.Resampling.BILINEAR)
    attention = np.clip(np.asarray(smooth), 0, 1)
    colour = colormaps[SEQUENTIAL](attention)[:, :, :3]  # (s, s, 3), without alpha

    mixed = 0.38 * light + 0.62 * colour
    pixels = 255 * np.clip(mixed, 0, 1)
    return np.asarray(pixels.round(), np.uint8)
