"""Images as users have them: one rule for methods, ``predict``, pipelines, service and app."""

import base64
import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from cliquetta.data.files import path_column
from cliquetta.data.images import MAX_PIXELS, ImageError, open_image, to_rgb
from cliquetta.data.remote import expand_glob, is_url, open_listed
from cliquetta.data.views import attach_views, image_views, to_pixels
from cliquetta.errors import UserError
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec

ImageLike = (
    str | os.PathLike[str] | bytes | Image.Image | npt.NDArray[np.uint8] | Tensor
)
"""A path or URL, the bytes of a file, a PIL image, an array (H, W), (H, W, 3) or (H, W,
4), or a tensor (3, H, W) of uint8."""
ChannelOrder = Literal["rgb", "bgr"]
"""Order of the channels of arrays and uint8 tensors: OpenCV reads images as ``bgr``."""
_DATA_URI = "data:image/"
# A plain image has no more levels of brightness: nothing can be concluded from it.
_FEW_LEVELS = 8


def is_single(images: Any) -> bool:
    """Whether this is one image: a path without wildcards, a file, or pixels without a batch."""
    if isinstance(images, str):
        return images.startswith(_DATA_URI) or expand_glob(images) is None

    # A batch has one axis more than an image.
    if isinstance(images, np.ndarray | Tensor):
        return images.ndim < 4

    if isinstance(images, os.PathLike | bytes | bytearray | Image.Image):
        return True
    return _is_file(images)


def separate_images(
    images: Any, preprocess: Preprocess | None, *, channel_order: ChannelOrder = "rgb"
) -> Iterator[ImageLike]:
    """Yield the images of whatever a user has, one by one.

    Args:
        images: One image (:data:`ImageLike`, a file object, a ``data:`` URI or
            preprocessed pixels (3, S, S)), a glob, an iterable of these, an array (N,
            H, W, 3), a tensor (N, 3, H, W), or a DataFrame with a column of paths.
        preprocess: The rule that made preprocessed pixels, which become pictures again;
            without it they are refused.
        channel_order: Of arrays and uint8 tensors; files and PIL images know theirs.

    """
    if is_table(images):
        column = path_column(list(images.columns), "the DataFrame")
        images = [str(path) for path in images[column]]
    elif isinstance(images, str) or is_single(images):
        images = [images]
    elif not isinstance(images, Iterable) or isinstance(images, Mapping):
        raise not_an_image(images)

    # A collection may mix all kinds of images.
    for image in images:
        if isinstance(image, str) and image.startswith(_DATA_URI):
            yield from_base64(image)
        elif isinstance(image, str):
            yield from expand_glob(image) or [image]
        elif isinstance(image, Tensor) and image.is_floating_point():
            yield _restore_picture(image, preprocess, channel_order)
        elif image is None:
            raise not_an_image(image)
        elif _is_file(image):
            yield image.read()
        else:
            yield _as_rgb(image, channel_order)


def _restore_picture(
    pixels: Tensor, preprocess: Preprocess | None, channel_order: ChannelOrder
) -> npt.NDArray[np.uint8]:
    """Make a picture again of preprocessed pixels, exact where they came from 8 bits."""
    if preprocess is None or pixels.shape != (3, preprocess.size, preprocess.size):
        raise not_an_image(pixels)
    if channel_order != "rgb":
        raise UserError("preprocessed pixels are RGB: leave out channel_order")

    refuse_unnormalised(pixels, preprocess)
    picture: npt.NDArray[np.uint8] = preprocess.unnormalise(pixels).cpu().numpy()
    return picture


def _as_rgb(image: ImageLike, channel_order: ChannelOrder) -> ImageLike:
    """Bring the channels of an array or tensor into the order red, green, blue."""
    if channel_order == "rgb" or not isinstance(image, np.ndarray | Tensor):
        return image
    if image.ndim != 3:
        return image
    if isinstance(image, Tensor):
        return image.flip(0) if len(image) == 3 else image

    # Blue, green, red; an alpha channel stays the last.
    order = {3: [2, 1, 0], 4: [2, 1, 0, 3]}.get(image.shape[2])
    if order is None:
        return image  # refused where it is opened
    return np.ascontiguousarray(image[:, :, order])


def refuse_unnormalised(pixels: Tensor, preprocess: Preprocess) -> None:
    """Refuse pixels of one image (3, S, S) that are bytes divided by 255, as ``ToTensor`` makes.

    Normalised pixels are no such fractions, and reach beyond 0 and 1 but for plain
    grey.
    """
    low, high = pixels.aminmax()
    normalises = any(preprocess.mean) or set(preprocess.std) != {1.0}
    if low < 0 or high > 1 or not normalises:
        return

    # Divided bytes are whole again times 255.
    levels = pixels.detach().float().cpu() * 255

    from_whole = (levels - levels.round()).abs().max()
    if from_whole < 1e-3 and len(np.unique(levels.numpy())) > _FEW_LEVELS:
        raise UserError(
            "pixels lie between 0 and 1, as torchvision's ToTensor makes them: preprocess images "
            "with model.preprocess, or give PIL images or uint8 arrays"
        )


def is_table(images: Any) -> bool:
    """Whether this is a DataFrame."""
    return hasattr(images, "columns") and hasattr(images, "index")


def name_images(images: Sequence[ImageLike]) -> list[str]:
    """Name images by their paths, others by their number; equal paths by their number, too."""
    names = [
        os.fspath(image) if isinstance(image, str | os.PathLike) else str(number)
        for number, image in enumerate(images)
    ]
    often = Counter(names)
    return [
        f"{name} ({number})" if often[name] > 1 else name
        for number, name in enumerate(names)
    ]


def to_picture(
    image: ImageLike, *, max_pixels: int = MAX_PIXELS, untrusted: bool = False
) -> tuple[str, Image.Image]:
    """Return the key (a path, or a hash of bytes or pixels) and RGB picture of one image."""
    if isinstance(image, str) and is_url(image):
        return image, open_listed(image)
    if isinstance(image, str | os.PathLike):
        return Path(image).as_posix(), open_image(image)

    if isinstance(image, bytes | bytearray):
        picture = open_image(bytes(image), max_pixels=max_pixels, untrusted=untrusted)
        return _hash(image), picture
    if isinstance(image, Image.Image):
        picture = to_rgb(image)
        return _hash(np.asarray(picture).data), picture

    # Tensors have their channels first.
    if isinstance(image, Tensor) and image.ndim == 3:
        image = image.movedim(0, -1).cpu().numpy()

    if isinstance(image, np.ndarray) and image.dtype == np.uint8:
        # Pixels of 8 bits: grey, RGB or RGBA.
        is_grey = image.ndim == 2
        is_coloured = image.ndim == 3 and image.shape[2] in (3, 4)
        if is_grey or is_coloured:
            return to_picture(Image.fromarray(image))
    raise not_an_image(image)


def not_an_image(image: Any) -> UserError:
    """Return an error that says what an image may be."""
    message = (
        f"not an image: {_describe(image)}; give paths, PIL images, uint8 arrays (H, W, 3), or a "
        "tensor of pixels (B, 3, S, S) preprocessed with model.preprocess"
    )
    if isinstance(image, list | tuple | Mapping):
        message += "; (image, label) pairs come from a torch Dataset or DataLoader"
    return UserError(message)


def _describe(value: Any) -> str:
    """Describe a value in a few words, however much it holds."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{tuple(value.shape)} {value.dtype}"

    if isinstance(value, list | tuple):
        # A few types stand for all.
        kinds = [type(part).__name__ for part in value[:3]]
        if len(value) > 3:
            kinds.append("...")
        kind = type(value).__name__
        return f"a {kind} of {len(value)} ({', '.join(kinds)})"
    text = repr(value)
    return " ".join(text.split())[:80]


def _hash(data: bytes | memoryview) -> str:
    """Name an image by what it shows, or by its file."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _is_file(image: Any) -> bool:
    """Whether this is an opened file."""
    return hasattr(image, "read") and not isinstance(image, type)


def from_base64(text: str) -> bytes:
    """Decode base64 text, bare or as a ``data:`` URI."""
    data = text.partition(",")[2] if text.startswith(_DATA_URI) else text
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise UserError(
            f"not an image: {text[:40]!r}... is not base64 ({error})"
        ) from None


# One or several, as for `separate_images`.
Images = Batch | ImageLike | Iterable[ImageLike]


def as_batch(
    images: Images,
    preprocess: Preprocess,
    *,
    views: ViewSpec | None = None,
    seed: int = 0,
    channel_order: ChannelOrder = "rgb",
    max_pixels: int = MAX_PIXELS,
    untrusted: bool = False,
    on_error: Callable[[int, ImageError], None] | None = None,
) -> Batch:
    """Make the batch of some images, with the views that a method wants.

    Keys are paths as they stand, or hashes, so that views do not depend on the batch.
    Tensors of floats are preprocessed already. ``on_error`` gets the numbers of
    unreadable images, which are left out; ``max_pixels`` and ``untrusted`` are for
    bytes.
    """
    if isinstance(images, Tensor) and images.is_floating_point():
        images = Batch(images if images.ndim > 3 else images[None])
        # The check would have to wait for another device.
        if len(images) and images.images.device.type == "cpu":
            refuse_unnormalised(images.images[0], preprocess)
    if isinstance(images, Batch):
        if channel_order != "rgb":
            raise UserError("preprocessed pixels are RGB: leave out channel_order")
        _check_pixels(images, preprocess)
        if views is None or images.views is not None:
            return images
        return _add_views(images, views, seed, preprocess)

    keys = []
    made = []
    separated = separate_images(images, preprocess, channel_order=channel_order)
    for number, image in enumerate(separated):
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
    pixels = to_pixels(torch.stack(made), preprocess)
    if views is None:
        return Batch(pixels, tuple(keys))
    return Batch(pixels[:, 0], tuple(keys), pixels)


def _check_pixels(batch: Batch, preprocess: Preprocess) -> None:
    """Refuse pixels of a shape that preprocessing does not make."""
    size = preprocess.size
    shape = tuple(batch.images.shape)
    if len(shape) != 4 or shape[1:] != (3, size, size):
        raise UserError(
            f"pixels must be (B, 3, {size}, {size}), got {shape}: preprocess them with "
            "model.preprocess, or pass paths or PIL images"
        )


def _add_views(
    batch: Batch, views: ViewSpec, seed: int, preprocess: Preprocess
) -> Batch:
    """Make views of preprocessed pixels; images without a key are named by their pixels."""
    if len(batch.keys) != len(batch):
        pixels = batch.images.cpu().float().contiguous().numpy()
        keys = tuple(_hash(image.data) for image in pixels)
        batch = dataclasses.replace(batch, keys=keys)
    return attach_views(batch, views, seed=seed, preprocess=preprocess)
