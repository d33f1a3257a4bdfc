"""Images of strangers: decoded one by one, refused one by one, with the reason."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.data.images import ImageError, open_image
from cliquetta.data.views import image_views
from cliquetta.model.preprocess import Preprocess
from cliquetta.types import Batch, ViewSpec

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's decoders that a client's bytes may reach; others are large, rare or run programs."""

_START_OF_SCAN = b"\xff\xda"
_MOST_SCANS = 200  # of a JPEG: each costs a pass over all pixels, however few bytes it has
_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-fA-F]+>")


@dataclass(frozen=True)
class Upload:
    """One image as it was sent."""

    name: str
    data: bytes

    @property
    def key(self) -> str:
        """The name that its views are drawn with: equal bytes, equal views."""
        return hashlib.sha256(self.data).hexdigest()[:16]


@dataclass(frozen=True)
class Refused:
    """An image that could not be used."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class Decoded:
    """The usable images of a batch, where they stood in the request, and the others."""

    batch: Batch
    places: tuple[int, ...]
    refused: tuple[Refused, ...]


def decode(
    uploads: Sequence[Upload],
    preprocess: Preprocess,
    *,
    views: ViewSpec | None,
    seed: int,
    max_pixels: int,
    check: Callable[[], None] = lambda: None,
) -> Decoded:
    """Pixels (and views) of all images that can be read; ``check`` is called before each."""
    pixels: list[Tensor] = []
    places: list[int] = []
    refused: list[Refused] = []
    for index, upload in enumerate(uploads):
        check()
        try:
            pixels.append(_pixels(upload, preprocess, views, seed, max_pixels))
            places.append(index)
        except ImageError as error:
            refused.append(Refused(index, upload.name, _presentable(error.reason)))
    keys = tuple(uploads[place].key for place in places)
    size = preprocess.size
    stacked = torch.stack(pixels) if pixels else torch.empty(0, 3, size, size)
    if views is None or not pixels:
        batch = Batch(stacked, keys)
    else:
        batch = Batch(stacked[:, 0], keys, stacked)
    return Decoded(batch, tuple(places), tuple(refused))


def _pixels(
    upload: Upload, preprocess: Preprocess, views: ViewSpec | None, seed: int, max_pixels: int
) -> Tensor:
    """Pixels (3, S, S) of one image, or its views (V, 3, S, S)."""
    _check_header(upload.data, max_pixels)
    image = open_image(upload.data, max_pixels=max_pixels, formats=FORMATS)
    if views is None:
        return preprocess(image)
    return image_views(image, upload.key, views, seed, preprocess)


def _check_header(data: bytes, max_pixels: int) -> None:
    """Refuse what costs a decoder much before Pillow would look at it."""
    if data[:2] == b"\xff\xd8" and data.count(_START_OF_SCAN) > _MOST_SCANS:
        raise ImageError("image", f"a JPEG of more than {_MOST_SCANS} scans")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP" and data[12:16] == b"VP8X":
        # libwebp makes room for the whole canvas when it is opened, not when it is decoded
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        if width * height > max_pixels:
            reason = f"too large ({width} x {height}, more than {max_pixels:,} pixels)"
            raise ImageError("image", reason)


def _presentable(reason: str) -> str:
    """A decoder's words without addresses of this process, and not too many of them."""
    return _ADDRESS.sub("the data", reason)[:300]
