"""The figure of attention maps: plain CLIP, each clique's prompt, all prompts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from cliquetta.evaluation.evidence_log import Evidence
from cliquetta.report.attention import Kind
from cliquetta.report.style import DIVERGING, FAINT, SEQUENTIAL, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDE = 96
"""Pixels of an overlay."""
_COLUMNS = 6
"""Maps of one image: plain, up to four cliques, together."""


@dataclass(frozen=True, eq=False)
class ImageMaps:
    """One image with its maps."""

    picture: npt.NDArray[np.uint8]
    """(s, s, 3)."""
    title: str
    maps: npt.NDArray[np.float32]
    """(R, 1 + T): plain, cliques, together."""
    cliques: tuple[tuple[str, int], ...]
    """Class and size of each clique."""


def image_maps(
    evidence: Evidence, names: Sequence[str], limit: int, kind: Kind = "class"
) -> list[ImageMaps]:
    """The first ``limit`` images with maps, taken from the batches in turn."""
    queues = [[(batch, entry) for entry in batch.maps] for batch in evidence.batches]
    order = sorted(
        (
            (turn, number, pair)
            for number, queue in enumerate(queues)
            for turn, pair in enumerate(queue)
        ),
        key=lambda entry: entry[:2],
    )
    found = []
    for _, _, (batch, entry) in order[:limit]:
        cliques = [] if batch.description is None else batch.description["cliques"]
        before, after = names[batch.before[entry.place]], names[batch.after[entry.place]]
        label = batch.labels[entry.place]
        answer = before if before == after else f"{before} → {after}"
        truth = f"{names[label]}\n" if label >= 0 else ""
        found.append(
            ImageMaps(
                batch.pictures[entry.place],
                f"{truth}{answer}",
                entry.maps[kind],
                tuple((names[cliques[id]["class"]], cliques[id]["size"]) for id in entry.cliques),
            )
        )
    return found


def attention_figure(images: Sequence[ImageMaps]) -> Figure:
    """Two rows an image: its maps on one scale, and how each differs from plain CLIP's."""
    rows = 2 * len(images)
    with new_figure(8.0, 0.35 + 1.22 * rows) as figure:
        axes = figure.subplots(rows, _COLUMNS + 1, squeeze=False)
        for own in axes.flat:
            own.set_axis_off()
        for turn, image in enumerate(images):
            _draw(axes[2 * turn], axes[2 * turn + 1], image)
    return figure


def _draw(upper: Sequence[Axes], lower: Sequence[Axes], image: ImageMaps) -> None:
    grids = grids_of(image.maps)
    top = float(grids.max())
    titles = ["plain CLIP", *(f"{name} ×{size}" for name, size in image.cliques), "all prompts"]
    # "all prompts" stands in the last column, whatever the number of cliques.
    places = [*range(len(grids) - 1), _COLUMNS - 1]
    shifts = grids - grids[0]
    _show(upper[0], image.picture)
    upper[0].set_title(image.title, fontsize=8, loc="center", weight="normal")
    lower[0].text(
        1.0,
        0.5,
        "less and more\nthan plain CLIP,\neach on its\nown scale",
        ha="right",
        va="center",
        fontsize=7.5,
        color=FAINT,
        transform=lower[0].transAxes,
    )
    for place, grid, shift, title in zip(places, grids, shifts, titles, strict=True):
        _show(upper[place + 1], overlay(image.picture, grid / top))
        upper[place + 1].set_title(title, fontsize=8, loc="center", weight="normal")
        if place == 0:
            continue
        most = max(float(np.abs(shift).max()), 1e-12)
        own = lower[place + 1]
        own.imshow(shift, cmap=DIVERGING, vmin=-most, vmax=most, interpolation="none")
        moved = f"{100 * np.abs(shift).sum() / 2:.2g} % moved"
        own.set_title(moved, fontsize=7.5, loc="center", weight="normal")


def _show(axes: Axes, picture: npt.NDArray[np.uint8]) -> None:
    axes.imshow(picture, interpolation="none")


def grids_of(maps: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The patches' part (R, g, g) of maps (R, 1 + T)."""
    patches = maps[:, 2:]
    side = round(patches.shape[1] ** 0.5)
    return patches.reshape(len(maps), side, side)


def overlay(picture: npt.NDArray[np.uint8], heat: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """A picture in grey under a map with values in [0, 1]; the brighter, the more attention."""
    from matplotlib import colormaps

    size = (_SIDE, _SIDE)
    grey = Image.fromarray(picture).convert("L").resize(size, Image.Resampling.BICUBIC)
    smooth = Image.fromarray(heat.astype(np.float32)).resize(size, Image.Resampling.BILINEAR)
    colour = colormaps[SEQUENTIAL](np.clip(np.asarray(smooth), 0, 1))[:, :, :3]
    light = np.asarray(grey, np.float32)[:, :, None] / 255
    mixed = 0.38 * light + 0.62 * colour
    return np.asarray((255 * np.clip(mixed, 0, 1)).round(), np.uint8)
