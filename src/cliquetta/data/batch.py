"""Images as users have them, as the :class:`Batch` that a method predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from cliquetta.data.images import MAX_PIXELS, ImageError
from cliquetta.data.inputs import ImageLike, hash_pixels, separate_images, to_picture
from cliquetta.data.views import attach_views, image_views, to_pixels
from cliquetta.errors import UserError
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec

Images = Batch | ImageLike | Iterable[ImageLike]
"""One image or several, as :func:`~cliquetta.data.inputs.separate_images` takes them."""


def as_batch(
    images: Images,
    preprocess: Preprocess,
    *,
    views: ViewSpec | None = None,
    seed: int = 0,
    max_pixels: int = MAX_PIXELS,
    untrusted: bool = False,
    on_error: Callable[[int, ImageError], None] | None = None,
) -> Batch:
    """The batch of some images, with the views that a method wants.

    Paths are keys as they stand; other images are named by a hash of their bytes or pixels, so that
    their views do not depend on the batch they come in. Floating-point tensors (B, 3, S, S) or
    (3, S, S) are preprocessed already. ``on_error`` is called with the number of an image that
    cannot be read, which is then left out; ``max_pixels`` and ``untrusted`` are for bytes (see
    :func:`~cliquetta.data.inputs.to_picture`).

    Raises:
        ImageError: An image cannot be read, and there is no ``on_error``.
        UserError: Something is not an image.

    """
    if isinstance(images, Tensor) and images.is_floating_point():
        images = Batch(images if images.ndim > 3 else images[None])
    if isinstance(images, Batch):
        return _checked(images, preprocess, views, seed)
    keys: list[str] = []
    made: list[Tensor] = []
    for number, image in enumerate(separate_images(images, preprocess)):
        try:
            key, picture = to_picture(image, max_pixels=max_pixels, untrusted=untrusted)
        except ImageError as error:
            if on_error is None:
                raise
            on_error(number, error)
            continue
        keys.append(key)
        if views is None:
            made.append(torch.tensor(np.asarray(preprocess.picture(picture))))
        else:
            made.append(image_views(picture, key, views, seed, preprocess))
    if not made:
        return Batch(preprocess.batch([]))
    stacked = torch.stack(made)
    if views is None:
        return Batch(preprocess.pixels(stacked), tuple(keys))
    stacked = to_pixels(stacked, preprocess)
    return Batch(stacked[:, 0], tuple(keys), stacked)


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
