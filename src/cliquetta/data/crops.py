"""Random crops of an image and their resampling, for all views at once.

A crop enlarged to S x S is ``Y @ image @ X.T`` with two small matrices of triangle
weights; rounded after each factor, it is what Pillow computes with its antialiased
bilinear filter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from cliquetta.model.preprocess import resize_part

Integers = npt.NDArray[np.int64]

_ATTEMPTS = 10
_NARROWEST = 3 / 4
_WIDEST = 4 / 3
# Pictures enlarged to more crops' areas than this are resized crop by crop, as a 1 x
# 5,000,000 image would take gigabytes.
_LARGEST = 64
# Elements of interpolation matrices that are held at a time.
ROW_BUDGET = 1 << 24
# Factor of Pillow's weights before they are rounded to integers.
_ONE = 1 << 22


@dataclass(frozen=True)
class Boxes:
    """Crops of one image, which is first resized to ``height`` x ``width`` if it is not so."""

    height: int
    width: int
    top: Integers
    left: Integers
    rows: Integers
    columns: Integers
    mirrored: npt.NDArray[np.bool_]


def resized_crop_boxes(
    height: int,
    width: int,
    count: int,
    generator: np.random.Generator,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
) -> Boxes:
    """Draw crops of random area and aspect ratio; the largest fitting one if ten draws fail."""
    # Ten attempts for each crop: (count, attempts).
    smallest, largest = scale
    attempts = (count, _ATTEMPTS)
    area = height * width * generator.uniform(smallest, largest, size=attempts)
    log_aspect = generator.uniform(
        math.log(_NARROWEST), math.log(_WIDEST), size=attempts
    )
    aspect = np.exp(log_aspect)

    # Width times height is the area, width over height the aspect.
    columns = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    rows = np.rint(np.sqrt(area / aspect)).astype(np.int64)

    # The first attempt of each crop that fits, else the largest crop at the centre.
    fits_width = (columns > 0) & (columns <= width)
    fits_height = (rows > 0) & (rows <= height)
    fits = fits_width & fits_height
    first = fits.argmax(axis=1)
    drawn = fits.any(axis=1)
    crop = np.arange(count)
    tallest = min(height, round(width / _NARROWEST))
    widest = min(width, round(height * _WIDEST))
    rows = np.where(drawn, rows[crop, first], tallest)
    columns = np.where(drawn, columns[crop, first], widest)

    # What remains of the image decides how far a crop can move.
    position = generator.random((2, count))
    below = height - rows
    beside = width - columns
    top = np.where(drawn, np.floor(position[0] * (below + 1)), below // 2)
    left = np.where(drawn, np.floor(position[1] * (beside + 1)), beside // 2)
    return Boxes(
        height=height,
        width=width,
        top=top.astype(np.int64),
        left=left.astype(np.int64),
        rows=rows,
        columns=columns,
        mirrored=generator.random(count) < 0.5,
    )


def zoom_crop_boxes(
    height: int,
    width: int,
    count: int,
    generator: np.random.Generator,
    *,
    size: int,
    zoom: float,
) -> Boxes:
    """Draw crops of ``size`` from the image with its shorter side resized to ``zoom * size``."""
    short = round(zoom * size)
    shorter = min(height, width)
    factor = short / shorter

    # The shorter side becomes exactly `short`, the other one follows.
    tall = short if height == shorter else int(height * factor)
    wide = short if width == shorter else int(width * factor)

    # Every position that leaves the crop inside is as likely.
    position = generator.random((2, count))
    top = np.floor(position[0] * (tall - size + 1))
    left = np.floor(position[1] * (wide - size + 1))
    side = np.full(count, size)
    return Boxes(
        height=tall,
        width=wide,
        top=top.astype(np.int64),
        left=left.astype(np.int64),
        rows=side,
        columns=side,
        mirrored=generator.random(count) < 0.5,
    )


def crop_image(image: Image.Image, boxes: Boxes, size: int) -> npt.NDArray[np.uint8]:
    """Cut the crops (V, size, size, 3) of an RGB picture by Pillow."""
    enlarged = (boxes.width, boxes.height) != image.size

    # A very long picture is never resized as a whole.
    piecewise = enlarged and boxes.width * boxes.height > _LARGEST * size**2
    if enlarged and not piecewise:
        image = _resize(image, boxes.width, boxes.height)

    # Pixels of the picture for each pixel of the resized one that boxes refer to.
    across = image.width / boxes.width
    down = image.height / boxes.height
    crops = np.empty((len(boxes.top), size, size, 3), dtype=np.uint8)

    # Left, top, right and bottom of every crop: (V, 4).
    right = boxes.left + boxes.columns
    bottom = boxes.top + boxes.rows
    edges = np.stack([boxes.left, boxes.top, right, bottom], axis=1)
    for view, (x0, y0, x1, y1) in enumerate(edges.tolist()):
        if piecewise:
            # In pixels of the picture as it is.
            part = (x0 * across, y0 * down, x1 * across, y1 * down)
            crop = resize_part(image, size, Image.Resampling.BILINEAR, part)
        else:
            crop = _resize(image.crop((x0, y0, x1, y1)), size, size)
        crops[view] = np.asarray(crop)

    crops[boxes.mirrored] = crops[boxes.mirrored, :, ::-1]
    return crops


def _resize(image: Image.Image, width: int, height: int) -> Image.Image:
    """Resize bilinearly, across first: from 13 on Pillow takes the cheaper order, a level apart."""
    across = image.resize((width, image.height), Image.Resampling.BILINEAR)
    return across.resize((width, height), Image.Resampling.BILINEAR)


def crop_tensors(
    images: Tensor, boxes: Sequence[Boxes], size: int, *, eight_bit: bool = False
) -> Tensor:
    """Cut crops (B, V, 3, size, size) of images (B, 3, H, W), float32, differentiable.

    ``eight_bit`` says that values are 0 ... 255 and computes what Pillow computes, to
    the bit.
    """
    B, C, H, W = images.shape
    V = len(boxes[0].top)
    device = images.device
    dtype = torch.float32
    if eight_bit:
        # Pillow works with integers of 30 bits, which float64 holds and float32 does
        # not; MPS has no float64.
        dtype = torch.float64
        device = torch.device("cpu") if device.type == "mps" else device
    out = torch.empty(B, V, C, size, size, device=images.device)

    # Images at once, by the memory of their matrices.
    step = max(1, ROW_BUDGET // max(1, V * size * max(H, W)))
    for first in range(0, B, step):
        part = images[first : first + step].to(device, dtype)
        across, down = _matrices(boxes[first : first + step], H, W, size)
        if eight_bit:
            # Pillow's weights are integers, too.
            across, down = (
                (weights * _ONE + 0.5).floor_() for weights in (across, down)
            )
        n = len(part)

        # Across, one product for all views of an image:
        # (n, C * H, W) @ (n, W, V * size)
        across = across.to(device, dtype).permute(0, 3, 1, 2)
        lines = part.reshape(n, C * H, W)
        wide = lines @ across.reshape(n, W, V * size)
        if eight_bit:
            wide = _to_levels(wide)

        # Down: (n, V, size, H) @ (n, V, H, C * size)
        wide = wide.view(n, C, H, V, size).permute(0, 3, 2, 1, 4)
        wide = wide.reshape(n, V, H, C * size)
        crop = down.to(device, dtype) @ wide
        crop = crop.view(n, V, size, C, size).transpose(2, 3)
        if eight_bit:
            crop = _to_levels(crop)
        out[first : first + n] = crop
    return out


def _to_levels(values: Tensor) -> Tensor:
    """Round fixed-point sums in place to the nearest 8-bit values, halves up."""
    return values.div_(_ONE).add_(0.5).floor_().clamp_(0, 255)


def _matrices(
    boxes: Sequence[Boxes], H: int, W: int, size: int
) -> tuple[Tensor, Tensor]:
    """Compute interpolation matrices (B, V, size, W) and (B, V, size, H) of H x W images."""
    across = _triangle(
        start=np.stack([box.left for box in boxes]),
        extent=np.stack([box.columns for box in boxes]),
        resized=np.array([[box.width] for box in boxes]),
        length=W,
        size=size,
    )
    down = _triangle(
        start=np.stack([box.top for box in boxes]),
        extent=np.stack([box.rows for box in boxes]),
        resized=np.array([[box.height] for box in boxes]),
        length=H,
        size=size,
    )

    # A mirrored crop reads its columns from the right.
    mirrored = torch.from_numpy(np.stack([box.mirrored for box in boxes]))
    across[mirrored] = across[mirrored].flip(-2)
    return across, down


def _triangle(
    start: Integers, extent: Integers, resized: Integers, length: int, size: int
) -> Tensor:
    """Compute weights (B, V, size, length), rows of sum one: triangles a pixel wide or more.

    If the image is not resized first, positions count from the edge of the crop and
    nothing outside of it is seen; otherwise from the image's edge.
    """
    enlarged = np.broadcast_to(resized != length, start.shape)

    # Pixels of the image for each pixel of the crop.
    step = np.where(enlarged, length / resized, extent / size)[..., None]  # (B, V, 1)

    # Where the pixels of the crop are centred among those of the image: (B, V, size).
    first = np.where(enlarged, start, 0)[..., None]
    centre = (first + np.arange(size) + 0.5) * step

    # The pixels of the image, and which of them are seen: (B, V, length).
    origin = np.where(enlarged, 0, start)[..., None]
    end = np.where(enlarged, length, extent)[..., None]
    position = np.arange(length) - origin
    inside = (position >= 0) & (position < end)

    # A weight falls from 1 at the centre to 0 one step away: (B, V, size, length).
    weights = position[..., None, :] - centre[..., None] + 0.5
    weights *= 1 / np.maximum(step, 1.0)[..., None]

    np.abs(weights, out=weights)
    np.subtract(1.0, weights, out=weights)

    # Rows sum to one over the pixels that are seen.
    weights *= inside[..., None, :]
    np.maximum(weights, 0.0, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return torch.from_numpy(weights)
