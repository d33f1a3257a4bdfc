"""JPEG files decoded, resized and cropped on a GPU by nvJPEG, through torchvision.

Pillow reads every file's header, and decodes what nvJPEG would not read or would read
otherwise: other formats and colours, truncated files, extreme shapes.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image
from torch import Tensor

from cliquetta.data.dataset import Dataset, FileDataset
from cliquetta.data.images import MAX_PIXELS, ImageError, open_image
from cliquetta.data.workers import Array, Made
from cliquetta.errors import UserError
from cliquetta.model.preprocess import LONGEST, Preprocess

_END_OF_IMAGE = b"\xff\xd9"
_FLIPPED = {2: (-1,), 3: (-2, -1), 4: (-2,), 6: (-1,), 7: (-2, -1), 8: (-2,)}
"""Axes of (3, H, W) to flip by EXIF orientation, after the transposition of those from 5 on."""


class Jpeg(NamedTuple):
    """A JPEG file that nvJPEG reads as Pillow does."""

    data: bytes
    orientation: int = 1  # of EXIF


def open_or_read(dataset: Dataset, index: int) -> Image.Image | Jpeg:
    """Image ``index``, or its file if a GPU can decode it."""
    if not isinstance(dataset, FileDataset):
        return dataset.load(index)
    data = dataset.read(index)
    return read_jpeg(data, exif=dataset.exif) or dataset.decode(index, data)


def read_jpeg(data: bytes, *, exif: bool = True) -> Jpeg | None:
    """The file, or ``None`` if Pillow has to decode it or to say why it cannot be decoded."""
    try:
        with Image.open(BytesIO(data), formats=["JPEG"]) as image:
            orientation = (
                int(image.getexif().get(ExifTags.Base.Orientation, 1)) if exif else 1
            )
    except Exception:  # decoders raise errors of every kind on damaged files
        return None
    short, long = sorted(image.size)
    colours = image.mode == "L" or (
        image.mode == "RGB" and image.info.get("adobe_transform", 1)
    )
    usual = long <= LONGEST * short and short * long <= MAX_PIXELS
    complete = data.rstrip(b"\0").endswith(_END_OF_IMAGE)
    return Jpeg(data, orientation) if colours and usual and complete else None


def turn(image: Tensor, orientation: int) -> Tensor:
    """An image (3, H, W) as its EXIF orientation says that it is to be seen."""
    image = image.transpose(-2, -1) if orientation in (5, 6, 7, 8) else image
    return image.flip(_FLIPPED[orientation]) if orientation in _FLIPPED else image


def resize_and_crop(image: Tensor, preprocess: Preprocess) -> Tensor:
    """:meth:`Preprocess.picture` (S, S, 3) of an image (3, H, W), uint8; equal up to rounding."""
    size, (height, width) = preprocess.size, image.shape[-2:]
    target = (size, size)
    if preprocess.resize == "shorter":
        longer = int(size * max(height, width) / min(height, width))
        target = (longer, size) if width <= height else (size, longer)
    floats = image[None].to(torch.float32)
    resized = F.interpolate(
        floats, target, mode=preprocess.interpolation, antialias=True
    )[0]
    top, left = (preprocess.offset(side - size) for side in target)
    cropped = resized[:, top : top + size, left : left + size]
    return cropped.round().clamp(0, 255).to(torch.uint8).movedim(0, -1)


@dataclass(frozen=True)
class JpegDecoder:
    """Makes pictures of JPEG files on a device."""

    preprocess: Preprocess
    device: torch.device

    def check(self) -> None:
        """Raise :class:`UserError` unless files can be decoded here."""
        instead = "or decode with --decode exact or fast"
        if self.device.type != "cuda":
            where = f"on a CUDA device, not on {self.device}: choose --device cuda, {instead}"
            raise UserError(f"--decode gpu needs the model {where}")
        if self.preprocess.interpolation == "lanczos":
            raise UserError(
                f"--decode gpu cannot resize by lanczos as this model does: {instead}"
            )
        file = BytesIO()
        Image.new("RGB", (8, 8)).save(file, "JPEG")
        try:
            self._decode([Jpeg(file.getvalue())])
        except (
            Exception
        ) as error:  # no torchvision, one without CUDA, or one of another torch
            what = f"({error}): pip install 'cliquetta[gpu-decode]', {instead}"
            raise UserError(
                f"--decode gpu needs a torchvision with CUDA {what}"
            ) from error

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """A stream for decoding alone, of the pool that nothing else takes streams from.

        torchvision decodes on a stream of its own that does not wait for the caller's,
        into memory which work queued there may still read (pytorch/vision#9606). On
        this one nothing is queued.
        """
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    def complete(self, made: Made) -> Made:
        """Decode the files in what a worker made."""
        arrays, (numbers, unreadable, span, jpegs) = made
        if not jpegs:
            return made
        pictures, damaged = self.pictures(jpegs)
        for array in arrays:  # one: there are no views
            pictures |= dict(zip(numbers, array, strict=True))
        readable = sorted(pictures)
        stacked = (
            (np.stack([pictures[number] for number in readable]),) if readable else ()
        )
        return stacked, (readable, sorted(unreadable + damaged), span, {})

    def pictures(
        self, jpegs: Mapping[int, Jpeg]
    ) -> tuple[dict[int, Array], list[tuple[int, str]]]:
        """Pictures (S, S, 3) of numbered files, and why others cannot be read."""
        with suppress(
            RuntimeError
        ):  # it does not say which of them it cannot decode or resize
            return dict(zip(jpegs, self._decode(list(jpegs.values())), strict=True)), []
        made: dict[int, Array] = {}
        unreadable: list[tuple[int, str]] = []
        for number, jpeg in jpegs.items():
            try:
                image = open_image(jpeg.data, exif=jpeg.orientation != 1)
                made[number] = np.asarray(self.preprocess.picture(image))
            except ImageError as error:
                unreadable.append((number, error.reason))
        return made, unreadable

    def _decode(self, jpegs: Sequence[Jpeg]) -> Array:
        """Pictures (n, S, S, 3); one file that cannot be decoded fails all."""
        from torchvision.io import ImageReadMode, decode_jpeg

        files = [
            torch.frombuffer(bytearray(jpeg.data), dtype=torch.uint8) for jpeg in jpegs
        ]
        with (
            torch.cuda.stream(self.stream)
            if self.device.type == "cuda"
            else nullcontext()
        ):
            images = decode_jpeg(files, mode=ImageReadMode.RGB, device=self.device)
            pictures = [
                resize_and_crop(turn(image, jpeg.orientation), self.preprocess)
                for image, jpeg in zip(images, jpegs, strict=True)
            ]
            made: Array = torch.stack(pictures).cpu().numpy()  # waits for the stream
        return made
