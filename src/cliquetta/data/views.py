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
    """Views of a picture: (V, S, S, 3) in 8 bits; AugMix mixes normalised pixels, (V, 3, S, S)."""
    image = image if image.mode == "RGB" else image.convert("RGB")
    boxes, recipe = _draw(spec, seed, key, (image.height, image.width), preprocess.size)
    crops = torch.from_numpy(crop_image(image, boxes, preprocess.size))
    plain = torch.from_numpy(np.array(preprocess.picture(image)))
    return _finish(plain[None], crops[None], [recipe], preprocess)[0]


def to_pixels(views: Tensor, preprocess: Preprocess) -> Tensor:
    """Normalised pixels of what :func:`image_views` makes, on its device."""
    return preprocess.pixels(views) if views.dtype == torch.uint8 else views


def attach_views(
    batch: Batch, spec: ViewSpec, *, seed: int, preprocess: Preprocess | None = None
) -> Batch:
    """The batch with views cropped from its preprocessed pixels, on their device.

    What is outside the centre crop is out of reach: prefer ``Stream(views=...)``.
    ``augmix`` needs ``preprocess`` to find the 8-bit pictures that it works on.
    """
    check_spec(spec)
    if len(batch.keys) != len(batch):
        sizes = f"{len(batch)} images and {len(batch.keys)} keys"
        remedy = "make it with Batch(images, keys=...)"
        raise UserError(f"views are tied to keys: the batch has {sizes}; {remedy}")
    S = batch.images.shape[-1]
    if len(batch) == 0:
        return Batch(batch.images, (), batch.images.new_empty(0, spec.count, 3, S, S))
    boxes, recipes = zip(
        *(_draw(spec, seed, key, (S, S), S) for key in batch.keys), strict=True
    )
    if spec.kind != "augmix":
        crops = crop_tensors(batch.images, boxes, S).to(batch.images.dtype)
        return Batch(
            batch.images, batch.keys, torch.cat([batch.images[:, None], crops], dim=1)
        )
    if preprocess is None:
        remedy = "attach_views(..., preprocess=model.preprocess)"
        raise UserError(f"augmix needs the normalisation: {remedy}")
    pictures = preprocess.unnormalise(batch.images)
    crops = crop_tensors(pictures.movedim(-1, -3), boxes, S, eight_bit=True).to(
        torch.uint8
    )
    views = _finish(pictures, crops.movedim(-3, -1), recipes, preprocess).to(
        batch.images.dtype
    )
    views[:, 0] = batch.images  # as they were given, not by way of 8 bits
    return Batch(batch.images, batch.keys, views)


def _draw(
    spec: ViewSpec, seed: int, key: str, shape: tuple[int, int], size: int
) -> tuple[Boxes, Recipe | None]:
    """The random choices for the views of an image, by a generator of its own."""
    zoom = spec.zoom if spec.kind == "zoom-crop" else None
    digest = hashlib.sha256(
        repr((seed, key, spec.kind, spec.count, zoom)).encode()
    ).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:16], "big"))
    count = spec.count - 1
    if spec.kind == "zoom-crop":
        boxes = zoom_crop_boxes(*shape, count, generator, size=size, zoom=spec.zoom)
    else:
        boxes = resized_crop_boxes(*shape, count, generator, scale=(spec.min_area, 1.0))
    return boxes, draw_recipe(count, generator) if spec.kind == "augmix" else None


def _finish(
    plain: Tensor, crops: Tensor, drawn: Sequence[Recipe | None], preprocess: Preprocess
) -> Tensor:
    """Plain pictures (B, S, S, 3) before crops (B, V - 1, S, S, 3), all uint8; or AugMixed."""
    recipes = [recipe for recipe in drawn if recipe is not None]
    if not recipes:
        return torch.cat([plain[:, None], crops], dim=1)
    chains = augmix_chains(crops.movedim(-1, -3), recipes).movedim(-3, -1)
    mixed = mix(preprocess.pixels(crops), preprocess.pixels(chains), recipes)
    return torch.cat([preprocess.pixels(plain)[:, None], mixed], dim=1)
