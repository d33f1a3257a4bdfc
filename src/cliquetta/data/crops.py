"""Random crops of an image and their resampling, for all views at once.

Resizing is separable and linear: a crop of an image enlarged to S x S is ``Y @ image @ X.T`` with
two small matrices of triangle weights. Rounding after each factor makes it what Pillow computes
with its antialiased bilinear filter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

Integers = npt.NDArray[np.int64]

_ATTEMPTS = 10
_ROW_BUDGET = 1 << 24
"""Elements of interpolation matrices that are held at a time."""


@dataclass(frozen=True)
class Boxes:
    """Crops of one image, each to become size x size, some of them mirrored.

    The image is first resized to ``height`` x ``width`` as a whole (its own size means not at
    all). Arrays have one entry per view.
    """

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
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Boxes:
    """Crops of random area and aspect ratio; the largest fitting centre crop if ten draws fail."""
    shape = (count, _ATTEMPTS)
    area = height * width * generator.uniform(*scale, size=shape)
    aspect = np.exp(generator.uniform(math.log(ratio[0]), math.log(ratio[1]), size=shape))
    columns = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    rows = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (columns > 0) & (columns <= width) & (rows > 0) & (rows <= height)
    first = np.arange(count), fits.argmax(axis=1)
    found = fits.any(axis=1)
    centre_rows, centre_columns = _centre_crop(height, width, ratio)
    rows = np.where(found, rows[first], centre_rows)
    columns = np.where(found, columns[first], centre_columns)
    place = generator.random((2, count))
    top = np.where(found, np.floor(place[0] * (height - rows + 1)), (height - rows) // 2)
    left = np.where(found, np.floor(place[1] * (width - columns + 1)), (width - columns) // 2)
    mirrored = generator.random(count) < 0.5
    return Boxes(
        height, width, top.astype(np.int64), left.astype(np.int64), rows, columns, mirrored
    )


def _centre_crop(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int]:
    """Rows and columns of the largest crop whose aspect ratio is allowed."""
    if width / height < ratio[0]:
        return round(width / ratio[0]), width
    if width / height > ratio[1]:
        return height, round(height * ratio[1])
    return height, width


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
    tall, wide = (
        short if side == min(height, width) else int(side * factor) for side in (height, width)
    )
    place = generator.random((2, count))
    top = np.floor(place[0] * (tall - size + 1)).astype(np.int64)
    left = np.floor(place[1] * (wide - size + 1)).astype(np.int64)
    whole = np.full(count, size)
    return Boxes(tall, wide, top, left, whole, whole, generator.random(count) < 0.5)


def crop_image(image: Image.Image, boxes: Boxes, size: int) -> npt.NDArray[np.uint8]:
    """The crops (V, size, size, 3) of an RGB picture, by Pillow."""
    if image.size != (boxes.width, boxes.height):
        image = image.resize((boxes.width, boxes.height), Image.Resampling.BILINEAR)
    crops = np.empty((len(boxes.top), size, size, 3), dtype=np.uint8)
    for view, (top, left, rows, columns) in enumerate(
        zip(boxes.top, boxes.left, boxes.rows, boxes.columns, strict=True)
    ):
        crop = image.crop((int(left), int(top), int(left + columns), int(top + rows)))
        crops[view] = np.asarray(crop.resize((size, size), Image.Resampling.BILINEAR))
    crops[boxes.mirrored] = crops[boxes.mirrored, :, ::-1]
    return crops


def crop_tensors(
    images: Tensor, boxes: Sequence[Boxes], size: int, *, eight_bit: bool = False
) -> Tensor:
    """Crops (B, V, 3, size, size) of images (B, 3, H, W), float32, on their device.

    ``eight_bit`` says that values are 0 ... 255 and rounds as Pillow does; without it the crops
    are differentiable and values may be anything.
    """
    B, C, H, W = images.shape
    V = len(boxes[0].top)
    out = torch.empty(B, V, C, size, size, device=images.device)
    step = max(1, _ROW_BUDGET // (V * size * max(H, W)))
    for first in range(0, B, step):
        part = images[first : first + step].float()
        across, down = _matrices(boxes[first : first + step], H, W, size)
        across, down = across.to(images.device), down.to(images.device)
        n = len(part)
        # (n, C*H, W) @ (n, W, V*S): one product for all views of an image
        wide = part.reshape(n, C * H, W) @ across.permute(0, 3, 1, 2).reshape(n, W, V * size)
        wide = _rounded(wide) if eight_bit else wide
        wide = wide.view(n, C, H, V, size).permute(0, 3, 2, 1, 4).reshape(n, V, H, C * size)
        crop = (down @ wide).view(n, V, size, C, size).transpose(2, 3)
        out[first : first + n] = _rounded(crop) if eight_bit else crop
    return out


def _rounded(values: Tensor) -> Tensor:
    """The nearest 8-bit values, halves up."""
    return (values + 0.5).floor_().clamp_(0, 255)


def _matrices(boxes: Sequence[Boxes], H: int, W: int, size: int) -> tuple[Tensor, Tensor]:
    """Interpolation matrices (B, V, size, W) and (B, V, size, H) of the crops of H x W images."""
    left = np.stack([box.left for box in boxes])
    columns = np.stack([box.columns for box in boxes])
    top = np.stack([box.top for box in boxes])
    rows = np.stack([box.rows for box in boxes])
    across = _triangle(left, columns, np.array([[box.width] for box in boxes]), W, size)
    down = _triangle(top, rows, np.array([[box.height] for box in boxes]), H, size)
    mirrored = torch.from_numpy(np.stack([box.mirrored for box in boxes]))
    across = torch.where(mirrored[..., None, None], across.flip(2), across)
    return across, down


def _triangle(
    start: Integers, extent: Integers, resized: Integers, length: int, size: int
) -> Tensor:
    """Weights (B, V, size, length), rows of sum one.

    Output i looks at the point whose place in the resized image is start + (i + 0.5) * extent /
    size; a triangle as wide as one output pixel, but at least as one input pixel, weighs the
    inputs around it. A crop of an image that is not resized first sees nothing outside the crop.
    """
    zoom = length / resized  # input pixels per pixel of the resized image
    step = extent / size * zoom  # (B, V)
    centre = (start * zoom)[..., None] + (np.arange(size) + 0.5) * step[..., None]
    place = np.arange(length) + 0.5
    distance = np.abs(place - centre[..., None]) / np.maximum(step, 1.0)[..., None, None]
    weights = np.maximum(1.0 - distance, 0.0)
    own = np.broadcast_to(resized == length, start.shape)
    low = np.where(own, start, 0)[..., None, None]
    high = np.where(own, start + extent, length)[..., None, None]
    weights *= (place > low) & (place < high)
    weights /= weights.sum(axis=-1, keepdims=True)
    return torch.from_numpy(weights.astype(np.float32))
