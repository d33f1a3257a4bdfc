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
_NARROWEST, _WIDEST = 3 / 4, 4 / 3
_LARGEST = 64
"""Pictures enlarged to more crops' areas than this are resized crop by crop, as a 1 x
5,000,000 image would take gigabytes."""
ROW_BUDGET = 1 << 24  # elements of interpolation matrices that are held at a time


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
    """Crops of random area and aspect ratio; the largest fitting centre crop if ten draws fail."""
    shape = (count, _ATTEMPTS)
    area = height * width * generator.uniform(*scale, size=shape)
    aspect = np.exp(
        generator.uniform(math.log(_NARROWEST), math.log(_WIDEST), size=shape)
    )
    columns = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    rows = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (columns > 0) & (columns <= width) & (rows > 0) & (rows <= height)
    first, drawn = (np.arange(count), fits.argmax(axis=1)), fits.any(axis=1)
    rows = np.where(drawn, rows[first], min(height, round(width / _NARROWEST)))
    columns = np.where(drawn, columns[first], min(width, round(height * _WIDEST)))
    position = generator.random((2, count))
    top = np.where(
        drawn, np.floor(position[0] * (height - rows + 1)), (height - rows) // 2
    )
    left = np.where(
        drawn, np.floor(position[1] * (width - columns + 1)), (width - columns) // 2
    )
    corner = top.astype(np.int64), left.astype(np.int64)
    return Boxes(height, width, *corner, rows, columns, generator.random(count) < 0.5)


def zoom_crop_boxes(
    height: int,
    width: int,
    count: int,
    generator: np.random.Generator,
    *,
    size: int,
    zoom: float,
) -> Boxes:
    """Crops of ``size`` from the image with its shorter side resized to ``zoom * size``."""
    short = round(zoom * size)
    factor = short / min(height, width)
    sides = (height, width)
    tall, wide = (short if side == min(sides) else int(side * factor) for side in sides)
    position = generator.random((2, count))
    top = np.floor(position[0] * (tall - size + 1)).astype(np.int64)
    left = np.floor(position[1] * (wide - size + 1)).astype(np.int64)
    side = np.full(count, size)
    return Boxes(tall, wide, top, left, side, side, generator.random(count) < 0.5)


def crop_image(image: Image.Image, boxes: Boxes, size: int) -> npt.NDArray[np.uint8]:
    """The crops (V, size, size, 3) of an RGB picture, by Pillow."""
    crops = np.empty((len(boxes.top), size, size, 3), dtype=np.uint8)
    enlarged = (boxes.width, boxes.height) != image.size
    piecewise = enlarged and boxes.width * boxes.height > _LARGEST * size**2
    across, down = image.width / boxes.width, image.height / boxes.height
    if enlarged and not piecewise:
        image = _resize(image, boxes.width, boxes.height)
    edges = (boxes.left, boxes.top, boxes.left + boxes.columns, boxes.top + boxes.rows)
    for view, (left, top, right, bottom) in enumerate(np.stack(edges, axis=1).tolist()):
        if piecewise:
            part = (left * across, top * down, right * across, bottom * down)
            crop = resize_part(image, size, Image.Resampling.BILINEAR, part)
        else:
            crop = _resize(image.crop((left, top, right, bottom)), size, size)
        crops[view] = np.asarray(crop)
    crops[boxes.mirrored] = crops[boxes.mirrored, :, ::-1]
    return crops


def _resize(image: Image.Image, width: int, height: int) -> Image.Image:
    """Bilinear, across first: from 13 on Pillow would take the cheaper order, a level apart."""
    across = image.resize((width, image.height), Image.Resampling.BILINEAR)
    return across.resize((width, height), Image.Resampling.BILINEAR)


def crop_tensors(
    images: Tensor, boxes: Sequence[Boxes], size: int, *, eight_bit: bool = False
) -> Tensor:
    """Crops (B, V, 3, size, size) of images (B, 3, H, W), float32, on their device; differentiable.

    ``eight_bit`` says that values are 0 ... 255 and computes what Pillow computes, to
    the bit.
    """
    B, C, H, W = images.shape
    V = len(boxes[0].top)
    # Pillow works with integers of 30 bits, which float64 holds and float32 does not.
    dtype = torch.float64 if eight_bit else torch.float32
    device = (
        torch.device("cpu")
        if images.device.type == "mps" and eight_bit
        else images.device
    )
    out = torch.empty(B, V, C, size, size, device=images.device)
    step = max(1, ROW_BUDGET // max(1, V * size * max(H, W)))
    for first in range(0, B, step):
        part = images[first : first + step].to(device, dtype)
        across, down = (
            ((weights * _ONE + 0.5).floor_() if eight_bit else weights).to(
                device, dtype
            )
            for weights in _matrices(boxes[first : first + step], H, W, size)
        )
        n = len(part)
        # (n, C*H, W) @ (n, W, V*S): one product for all views of an image
        wide = part.reshape(n, C * H, W) @ across.permute(0, 3, 1, 2).reshape(
            n, W, V * size
        )
        wide = _rounded(wide) if eight_bit else wide
        wide = (
            wide.view(n, C, H, V, size)
            .permute(0, 3, 2, 1, 4)
            .reshape(n, V, H, C * size)
        )
        crop = (down @ wide).view(n, V, size, C, size).transpose(2, 3)
        out[first : first + n] = _rounded(crop) if eight_bit else crop
    return out


_ONE = 1 << 22  # factor of Pillow's weights before they are rounded to integers


def _rounded(values: Tensor) -> Tensor:
    """The nearest 8-bit values of fixed-point sums, halves up."""
    return values.div_(_ONE).add_(0.5).floor_().clamp_(0, 255)


def _matrices(
    boxes: Sequence[Boxes], H: int, W: int, size: int
) -> tuple[Tensor, Tensor]:
    """Interpolation matrices (B, V, size, W) and (B, V, size, H) of the crops of H x W images."""
    top, left, rows, columns = (
        np.stack([getattr(box, name) for box in boxes])
        for name in ("top", "left", "rows", "columns")
    )
    across = _triangle(left, columns, np.array([[box.width] for box in boxes]), W, size)
    down = _triangle(top, rows, np.array([[box.height] for box in boxes]), H, size)
    mirrored = torch.from_numpy(np.stack([box.mirrored for box in boxes]))
    across[mirrored] = across[mirrored].flip(-2)
    return across, down


def _triangle(
    start: Integers, extent: Integers, resized: Integers, length: int, size: int
) -> Tensor:
    """Weights (B, V, size, length), rows of sum one: triangles at least one input pixel wide.

    If the image is not resized first, positions count from the edge of the crop and
    nothing outside of it is seen; otherwise from the image's edge.
    """
    enlarged = np.broadcast_to(resized != length, start.shape)
    step = np.where(enlarged, length / resized, extent / size)[..., None]  # (B, V, 1)
    first = np.where(enlarged, start, 0)[..., None]
    centre = (first + np.arange(size) + 0.5) * step  # (B, V, size)
    position = (
        np.arange(length) - np.where(enlarged, 0, start)[..., None]
    )  # (B, V, length)
    weights = position[..., None, :] - centre[..., None] + 0.5
    weights *= 1 / np.maximum(step, 1.0)[..., None]
    np.abs(weights, out=weights)
    np.subtract(1.0, weights, out=weights)
    inside = (position >= 0) & (
        position < np.where(enlarged, length, extent)[..., None]
    )
    weights *= inside[..., None, :]
    np.maximum(weights, 0.0, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    return torch.from_numpy(weights)
