"""Images as users have them, as the :class:`Batch` that a method predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from cliquetta.data.inputs import ImageLike, hash_pixels, separate_images, to_picture
from cliquetta.data.views import attach_views, image_views, to_pixels
from cliquetta.errors import UserError
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec

Images = Batch | ImageLike | Iterable[ImageLike]
"""One image or several, as :func:`~cliquetta.data.inputs.separate_images` takes them."""


def as_batch(
    images: Images, preprocess: Preprocess, *, views: ViewSpec | None = None, seed: int = 0
) -> Batch:
    """The batch of some images, with the views that a method wants.

    Paths are keys as they stand; other images are named by a hash of their pixels, so that their
    views do not depend on the batch they come in. Floating-point tensors (B, 3, S, S) or
    (3, S, S) are taken as preprocessed already.

    Raises:
        ImageError: An image cannot be read.
        UserError: Something is not an image.

    """
    if isinstance(images, Tensor) and images.is_floating_point():
        images = Batch(images if images.ndim > 3 else images[None])
    if isinstance(images, Batch):
        return _checked(images, preprocess, views, seed)
    named = [to_picture(image) for image in separate_images(images, preprocess)]
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
        keys = tuple(hash_pixels(image.cpu().float().numpy()) for image in batch.images)
        batch = dataclasses.replace(batch, keys=keys)
    return attach_views(batch, views, seed=seed, preprocess=preprocess)
