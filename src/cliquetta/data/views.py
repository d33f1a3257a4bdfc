"""Augmented views of an image: the plain one first, then random ones.

They depend on ``(seed, key, spec)`` only, so that all methods of a comparison see the
same. Crops are cut from the image as it was before preprocessing, by
:func:`attach_views` from pixels.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cliquetta.data.augmix import Recipe, augmix_chains, draw_recipe, mix
from cliquetta.data.crops import (
    Boxes,
    crop_image,
    crop_tensors,
    resized_crop_boxes,
    zoom_crop_boxes,
)
from cliquetta.errors import UserError, look_up
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec

VIEW_KINDS = {
    "resized-crop": "random area (8 to 100 % by default) and aspect ratio, mirrored half the time",
    "zoom-crop": "shorter side enlarged to zoom x size, random crop, mirrored half the time",
    "augmix": "resized-crop, then AugMix of severity 1 mixed after normalisation",
}


def check_spec(spec: ViewSpec) -> None:
    """Refuse views that cannot be made."""
    look_up("kind of views", spec.kind, VIEW_KINDS)
    if spec.count < 1:
        raise UserError(f"at least one view (the plain one), got {spec.count}")

    if spec.kind == "zoom-crop" and spec.zoom < 1:
        raise UserError(f"zoom must be at least 1 for a crop to fit, got {spec.zoom}")
    if not 0 < spec.min_area <= 1:
        raise UserError(f"min_area must be above 0 and at most 1, got {spec.min_area}")


def image_views(
    image: Image.Image, key: str, spec: ViewSpec, seed: int, preprocess: Preprocess
) -> Tensor:
    """Make the views of a picture, the plain one first.

    They are (V, S, S, 3) in 8 bits; AugMix mixes normalised pixels, (V, 3, S, S).
    """
    if image.mode != "RGB":
        image = image.convert("RGB")
    size = preprocess.size

    # Every view but the plain one is a crop.
    boxes, recipe = _draw(spec, seed, key, image.height, image.width, size)
    crops = torch.from_numpy(crop_image(image, boxes, size))
    plain = torch.from_numpy(np.array(preprocess.picture(image)))

    if recipe is None:
        return torch.cat([plain[None], crops])
    return _mix_views(plain[None], crops[None], [recipe], preprocess)[0]


def to_pixels(views: Tensor, preprocess: Preprocess) -> Tensor:
    """Return normalised pixels of what :func:`image_views` makes, on its device."""
    return preprocess.pixels(views) if views.dtype == torch.uint8 else views


def attach_views(
    batch: Batch, spec: ViewSpec, *, seed: int, preprocess: Preprocess | None = None
) -> Batch:
    """Return the batch with views cropped from its preprocessed pixels, on their device.

    What is outside the centre crop is out of reach: prefer ``Stream(views=...)``.
    ``augmix`` needs ``preprocess`` to find the 8-bit pictures that it works on.
    """
    check_spec(spec)
    images = batch.images
    if len(batch.keys) != len(batch):
        raise UserError(
            f"views are tied to keys: the batch has {len(batch)} images and "
            f"{len(batch.keys)} keys; make it with Batch(images, keys=...)"
        )

    S = images.shape[-1]
    if len(batch) == 0:
        return Batch(images, (), images.new_empty(0, spec.count, 3, S, S))

    choices = [_draw(spec, seed, key, S, S, size=S) for key in batch.keys]
    boxes = [box for box, _ in choices]
    recipes = [recipe for _, recipe in choices if recipe is not None]
    if not recipes:
        crops = crop_tensors(images, boxes, S).to(images.dtype)
        views = torch.cat([images[:, None], crops], dim=1)
        return Batch(images, batch.keys, views)

    if preprocess is None:
        raise UserError(
            "augmix needs the normalisation: "
            "attach_views(..., preprocess=model.preprocess)"
        )
    pictures = preprocess.unnormalise(images)

    crops = crop_tensors(pictures.movedim(-1, -3), boxes, S, eight_bit=True)
    crops = crops.to(torch.uint8).movedim(-3, -1)
    views = _mix_views(pictures, crops, recipes, preprocess).to(images.dtype)
    views[:, 0] = images  # as they came, not by way of 8 bits
    return Batch(images, batch.keys, views)


def _draw(
    spec: ViewSpec, seed: int, key: str, height: int, width: int, size: int
) -> tuple[Boxes, Recipe | None]:
    """Draw the random choices for the views of an image, by a generator of its own."""
    zoom = spec.zoom if spec.kind == "zoom-crop" else None
    choices = repr((seed, key, spec.kind, spec.count, zoom))
    digest = hashlib.sha256(choices.encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:16], "big"))

    # The first view is the plain one.
    count = spec.count - 1
    if spec.kind == "zoom-crop":
        boxes = zoom_crop_boxes(
            height, width, count, generator, size=size, zoom=spec.zoom
        )
        return boxes, None

    scale = (spec.min_area, 1.0)
    boxes = resized_crop_boxes(height, width, count, generator, scale=scale)
    if spec.kind == "augmix":
        return boxes, draw_recipe(count, generator)
    return boxes, None


def _mix_views(
    plain: Tensor, crops: Tensor, recipes: Sequence[Recipe], preprocess: Preprocess
) -> Tensor:
    """Mix crops (B, V - 1, S, S, 3) by AugMix behind plain pictures (B, S, S, 3), all uint8."""
    chains = augmix_chains(crops.movedim(-1, -3), recipes).movedim(-3, -1)
    mixed = mix(
        plain=preprocess.pixels(crops),
        chains=preprocess.pixels(chains),
        recipes=recipes,
    )

    first = preprocess.pixels(plain)[:, None]
    return torch.cat([first, mixed], dim=1)
