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
# Axes of (3, H, W) to flip by EXIF orientation, after the transposition of those from 5
# on.
_FLIPPED = {2: (-1,), 3: (-2, -1), 4: (-2,), 6: (-1,), 7: (-2, -1), 8: (-2,)}


class Jpeg(NamedTuple):
    """JPEG file that nvJPEG reads as Pillow does."""

    data: bytes
    # Of EXIF.
    orientation: int = 1


class ChunkNote(NamedTuple):
    """Report of a worker beside the pictures of a chunk; images are numbered in their batch."""

    # Numbers of the pictures, in their order.
    readable: list[int]
    # Numbers of other images, and why they could not be read.
    unreadable: list[tuple[int, str]]
    # Whether the batch ends with this chunk.
    last: bool
    batch_size: int
    # Files that are left to a :class:`JpegDecoder`, by number.
    jpegs: dict[int, Jpeg]


def open_or_read(dataset: Dataset, index: int) -> Image.Image | Jpeg:
    """Decode image ``index``, or read its file if a GPU can decode it."""
    if not isinstance(dataset, FileDataset):
        return dataset.load(index)
    data = dataset.read(index)
    jpeg = read_jpeg(data, exif=dataset.exif)
    return dataset.decode(index, data) if jpeg is None else jpeg


def read_jpeg(data: bytes, *, exif: bool = True) -> Jpeg | None:
    """Return the file, or ``None`` if Pillow has to decode it or to say why it cannot."""
    orientation = 1
    try:
        with Image.open(BytesIO(data), formats=["JPEG"]) as image:
            if exif:
                tags = image.getexif()
                orientation = int(tags.get(ExifTags.Base.Orientation, 1))
    except Exception:  # decoders raise errors of every kind on damaged files
        return None

    # Colours of other kinds, such as CMYK, are converted otherwise by nvJPEG.
    is_rgb = image.mode == "RGB" and image.info.get("adobe_transform", 1)
    if not (is_rgb or image.mode == "L"):
        return None
    short, long = sorted(image.size)
    if long > LONGEST * short or short * long > MAX_PIXELS:
        return None

    # A truncated file is Pillow's to report.
    complete = data.rstrip(b"\0").endswith(_END_OF_IMAGE)
    return Jpeg(data, orientation) if complete else None


def turn(image: Tensor, orientation: int) -> Tensor:
    """Turn an image (3, H, W) as its EXIF orientation says that it is to be seen."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(-2, -1)
    if orientation in _FLIPPED:
        image = image.flip(_FLIPPED[orientation])
    return image


def resize_and_crop(image: Tensor, preprocess: Preprocess) -> Tensor:
    """Make the picture (S, S, 3) of an image (3, H, W) as Pillow does, up to rounding."""
    size = preprocess.size
    height, width = image.shape[-2:]

    # The size before the crop; squashed pictures have no crop.
    rows = columns = size
    if preprocess.resize == "shorter":
        longer = int(size * max(height, width) / min(height, width))
        if width <= height:
            rows = longer
        else:
            columns = longer

    floats = image[None].to(torch.float32)
    resized = F.interpolate(
        floats, (rows, columns), mode=preprocess.interpolation, antialias=True
    )[0]

    top = preprocess.offset(rows - size)
    left = preprocess.offset(columns - size)

    cropped = resized[:, top : top + size, left : left + size]
    levels = cropped.round().clamp(0, 255)
    return levels.to(torch.uint8).movedim(0, -1)


@dataclass(frozen=True)
class JpegDecoder:
    """Makes pictures of JPEG files on a device."""

    preprocess: Preprocess
    device: torch.device

    def check(self) -> None:
        """Raise :class:`UserError` unless files can be decoded here."""
        instead = "or decode with --decode exact or fast"
        if self.device.type != "cuda":
            raise UserError(
                "--decode gpu needs the model on a CUDA device, not on "
                f"{self.device}: choose --device cuda, {instead}"
            )
        if self.preprocess.interpolation == "lanczos":
            raise UserError(
                f"--decode gpu cannot resize by lanczos as this model does: {instead}"
            )
        file = BytesIO()
        Image.new("RGB", (8, 8)).save(file, "JPEG")
        try:
            self._decode([Jpeg(file.getvalue())])
        # No torchvision, one without CUDA, or one of another torch.
        except Exception as error:
            raise UserError(
                f"--decode gpu needs a torchvision with CUDA ({error}): "
                f"pip install 'cliquetta[gpu-decode]', {instead}"
            ) from error

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Stream for decoding alone, of the pool that nothing else takes streams from.

        torchvision decodes on a stream of its own that does not wait for the caller's,
        into memory which work queued there may still read (pytorch/vision#9606). On
        this one nothing is queued.
        """
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    def complete(self, made: Made) -> Made:
        """Decode the files in what a worker made."""
        arrays, note = made
        if not note.jpegs:
            return made
        pictures, damaged = self.pictures(note.jpegs)
        if arrays:
            (opened,) = arrays  # one: there are no views
            pictures |= dict(zip(note.readable, opened, strict=True))

        # In the order of the batch, whoever decoded them.
        readable = sorted(pictures)
        completed = note._replace(
            readable=readable,
            unreadable=sorted(note.unreadable + damaged),
            jpegs={},
        )
        if not readable:
            return (), completed
        stacked = np.stack([pictures[number] for number in readable])
        return (stacked,), completed

    def pictures(
        self, jpegs: Mapping[int, Jpeg]
    ) -> tuple[dict[int, Array], list[tuple[int, str]]]:
        """Make pictures (S, S, 3) of numbered files, and say why others cannot be read."""
        # An error does not say which of them nvJPEG cannot decode or resize.
        with suppress(RuntimeError):
            decoded = self._decode(list(jpegs.values()))
            return dict(zip(jpegs, decoded, strict=True)), []

        # One by one, by Pillow.
        pictures: dict[int, Array] = {}
        unreadable: list[tuple[int, str]] = []
        for number, jpeg in jpegs.items():
            try:
                image = open_image(jpeg.data, exif=jpeg.orientation != 1)
                pictures[number] = np.asarray(self.preprocess.picture(image))
            except ImageError as error:
                unreadable.append((number, error.reason))

        return pictures, unreadable

    def _decode(self, jpegs: Sequence[Jpeg]) -> Array:
        """Decode pictures (n, S, S, 3); one file that cannot be decoded fails all."""
        from torchvision.io import ImageReadMode, decode_jpeg

        files = [
            torch.frombuffer(bytearray(jpeg.data), dtype=torch.uint8) for jpeg in jpegs
        ]
        on_gpu = self.device.type == "cuda"
        with torch.cuda.stream(self.stream) if on_gpu else nullcontext():
            images = decode_jpeg(files, mode=ImageReadMode.RGB, device=self.device)
            pictures = []
            for image, jpeg in zip(images, jpegs, strict=True):
                turned = turn(image, jpeg.orientation)
                pictures.append(resize_and_crop(turned, self.preprocess))
            made: Array = torch.stack(pictures).cpu().numpy()  # waits for the stream
        return made
