"""Images as users have them, as the :class:`Batch` that a method predicts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from cliquetta.data.images import open_image
from cliquetta.data.views import attach_views, image_views, to_pixels
from cliquetta.errors import UserError
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec

ImageLike = str | os.PathLike[str] | bytes | Image.Image | npt.NDArray[np.uint8] | Tensor
"""A path, the bytes of a file, a PIL image, an array (H, W), (H, W, 3) or (H, W, 4), or a tensor
(3, H, W) of uint8."""
Images = Batch | ImageLike | Sequence[ImageLike]
"""One image or several; arrays and tensors may carry the batch as their first dimension."""


def as_batch(
    images: Images, preprocess: Preprocess, *, views: ViewSpec | None = None, seed: int = 0
) -> Batch:
    """The batch of some images, with the views that a method wants.

    Paths are keys as they stand; other images are named by a hash of their pixels, so that their
    views do not depend on the batch they come in. Floating-point tensors (B, 3, S, S) are taken
    as preprocessed already.

    Raises:
        ImageError: An image cannot be read.
        UserError: Something is not an image.

    """
    if isinstance(images, Tensor) and images.is_floating_point():
        images = Batch(images)
    if isinstance(images, Batch):
        return _checked(images, preprocess, views, seed)
    named = [to_picture(image) for image in _separate(images)]
    keys = tuple(key for key, _ in named)
    if views is None or not named:
        return Batch(preprocess.batch([image for _, image in named]), keys)
    made = [image_views(image, key, views, seed, preprocess) for key, image in named]
    stacked = to_pixels(torch.stack(made), preprocess)
    return Batch(stacked[:, 0], keys, stacked)


def _checked(batch: Batch, preprocess: Preprocess, views: ViewSpec | None, seed: int) -> Batch:
    """A batch of preprocessed pixels; views are made of these where they are missing."""
    size = preprocess.size
    if batch.images.ndim != 4 or tuple(batch.images.shape[1:]) != (3, size, size):
        raise UserError(
            f"pixels must be (B, 3, {size}, {size}), got {tuple(batch.images.shape)}: preprocess "
            "them with model.preprocess, or pass paths or PIL images"
        )
    if views is None or batch.views is not None:
        return batch
    if len(batch.keys) != len(batch):
        keys = tuple(_hash(image.cpu().float().numpy()) for image in batch.images)
        batch = dataclasses.replace(batch, keys=keys)
    return attach_views(batch, views, seed=seed, preprocess=preprocess)


def _separate(images: ImageLike | Sequence[ImageLike]) -> Sequence[ImageLike]:
    """One image as a list of one; an array or tensor with a batch dimension as its images."""
    if isinstance(images, str | os.PathLike | bytes | Image.Image):
        return [images]
    if isinstance(images, np.ndarray | Tensor):
        return list(images) if images.ndim == 4 else [images]
    return images


def to_picture(image: ImageLike) -> tuple[str, Image.Image]:
    """Key and RGB picture of one image."""
    if isinstance(image, str | os.PathLike):
        return Path(image).as_posix(), open_image(image)
    if isinstance(image, bytes):
        image = open_image(image)
    if isinstance(image, Image.Image):
        picture = image.convert("RGB")
        return _hash(np.asarray(picture)), picture
    if isinstance(image, Tensor) and image.ndim == 3:
        image = image.movedim(0, -1).cpu().numpy()
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and _has_colours(image.shape):
        return to_picture(Image.fromarray(image))
    what = f"{tuple(image.shape)} {image.dtype}" if hasattr(image, "shape") else repr(image)
    raise UserError(
        f"not an image: {what}; give paths, PIL images, uint8 arrays (H, W, 3), or a tensor of "
        "pixels (B, 3, S, S) preprocessed with model.preprocess"
    )


def _has_colours(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))


def _hash(pixels: npt.NDArray[np.generic]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=8).hexdigest()
