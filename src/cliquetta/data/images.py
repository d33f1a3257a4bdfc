"""Open an image from anywhere as RGB, or say why it cannot be read.

What is done with the kinds of picture that loaders disagree on:

* orientation in the EXIF data is applied, as users' photographs need it; ``exif=False``
  leaves the pixels as stored, as the loaders of the published benchmarks do;
* transparency is dropped, not blended: RGBA, LA and palettes with transparent entries
  keep the colours that are stored under it, as ``convert("RGB")`` does in the reference
  loaders;
* CMYK and YCbCr are converted by Pillow; greyscale and 1-bit become three equal
  channels;
* greyscale of more than 8 bits is scaled to 8 bits, where ``convert("RGB")`` would clip
  it to white: 16-bit by its full range, 32-bit integers by the fewest bytes that hold
  them, and floats by 255 where none is above 1;
* of an animation the first frame is read;
* HEIF (``.heic``) is read where ``pillow-heif`` is installed, AVIF where Pillow can.
"""

import contextlib
import os
import re
import stat
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from cliquetta.errors import UserError

EXTENSIONS = frozenset(
    (
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".webp",
        ".bmp",
        ".gif",
        ".tif",
        ".tiff",
        ".ppm",
        ".heic",
        ".heif",
        ".avif",
    )
)
# Images of more pixels than this are refused before they are decoded.
MAX_PIXELS = 100_000_000
# Files larger than this are refused before they are read.
MAX_BYTES = 2**30

HEIF = "HEIF"
UNTRUSTED_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", HEIF)
"""Pillow's decoders that a stranger's bytes may reach; others are large, rare or run programs."""
_START_OF_SCAN = b"\xff\xda"
# Of a JPEG: each costs a pass over all pixels, however few bytes it has.
_MOST_SCANS = 200
_AVIF = (b"avif", b"avis")

Decode = Literal["exact", "fast", "gpu"]
"""Every pixel by Pillow; JPEG's own downscaling first, where an image is at least twice
as large as needed; or nvJPEG."""


class ImageError(UserError):
    """Picture that cannot be read; ``reason`` says why, without the name of the source."""

    def __init__(self, source: str, reason: str) -> None:
        self.source = source
        self.reason = reason
        super().__init__(f"{source}: {reason}")


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Make a key that sorts "2" before "10": runs of digits count as numbers."""
    parts = re.split(r"(\d+)", text)
    return [
        (1, int(part), "") if part.isdecimal() else (0, 0, part.lower())
        for part in parts
    ]


def open_image(
    source: str | os.PathLike[str] | bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    exif: bool = True,
    untrusted: bool = False,
    shorter: int | None = None,
) -> Image.Image:
    """Decode a picture as 8-bit RGB, of at most ``max_pixels``; else :class:`ImageError`.

    ``untrusted`` images reach the decoders of :data:`UNTRUSTED_FORMATS` only, and are
    refused if expensive to decode. ``shorter`` lets a JPEG be decoded at a part of its
    size, as long as its shorter side has that many pixels.
    """
    if isinstance(source, bytes):
        data = source
        name = f"image of {len(source)} bytes"
    else:
        data = read_image(source)
        name = os.fspath(source)
    if not data:
        raise ImageError(name, "an empty file")

    image = _open_stored(data, name, max_pixels, untrusted)
    _check_size(image.width, image.height, name, max_pixels)

    # Decoding happens here; a draft makes it cheaper.
    try:
        if shorter is not None and isinstance(image, JpegImageFile):
            image.draft("RGB", (shorter, shorter))
        image.load()
    except Exception as error:
        raise ImageError(name, f"damaged or truncated ({error})") from error
    return to_rgb(image, exif=exif)


def _open_stored(
    data: bytes, name: str, max_pixels: int, untrusted: bool
) -> Image.Image:
    """Open the picture as it is stored; its pixels are not decoded yet."""
    remedy = ""
    formats = None
    if not untrusted or data[8:12] not in _AVIF:
        remedy = _need_of_heif(data)
    if untrusted:
        _check_header(data, name, max_pixels)
        formats = list(UNTRUSTED_FORMATS)
        if HEIF not in Image.OPEN:
            formats.remove(HEIF)
    try:
        return Image.open(BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise ImageError(name, remedy or "not an image in a known format") from None
    except Image.DecompressionBombError as error:
        raise ImageError(name, f"too large ({error})") from None
    except Exception as error:  # decoders raise errors of every kind on damaged files
        raise ImageError(name, f"damaged ({error})") from error


def _check_size(width: int, height: int, name: str, most: int) -> None:
    """Refuse a picture of more than ``most`` pixels."""
    if width * height > most:
        raise ImageError(
            name, f"too large ({width} x {height}, more than {most:,} pixels)"
        )


def _check_header(data: bytes, name: str, max_pixels: int) -> None:
    """Refuse what is expensive to decode before Pillow would look at it."""
    is_jpeg = data[:2] == b"\xff\xd8"
    if is_jpeg and data.count(_START_OF_SCAN) > _MOST_SCANS:
        raise ImageError(name, f"a JPEG of more than {_MOST_SCANS} scans")

    # libwebp allocates the canvas when it is opened, not when it is decoded.
    is_extended_webp = data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X"
    if is_extended_webp:
        # 24 bits each, less one.
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        _check_size(width, height, name, max_pixels)


def _need_of_heif(data: bytes) -> str:
    """Make Pillow ready for a HEIF or AVIF image; return what is missing to read it."""
    if data[4:8] != b"ftyp":
        return ""
    if data[8:12] in _AVIF:
        return "an AVIF image: reading it needs Pillow 11.3 or newer"
    try:
        import pillow_heif
    except ImportError:
        return "a HEIF image: pip install 'cliquetta[heif]' to read it"
    pillow_heif.register_heif_opener()
    return ""


def to_rgb(image: Image.Image, *, exif: bool = True) -> Image.Image:
    """Convert to 8-bit RGB by the rules in the module's head; ``image`` is left as it was."""
    try:
        image.load()
    except Exception as error:
        raise ImageError("an open image", f"damaged or truncated ({error})") from error
    if exif:
        # A file with damaged EXIF data is still a picture; it is used as it is stored.
        with contextlib.suppress(Exception):
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
            if orientation != 1:  # else it would be copied
                image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _scale_grey(image).convert("RGB")

    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # what Pillow asks for; the colours stay the same
    return image.convert("RGB")


def _scale_grey(image: Image.Image) -> Image.Image:
    """Scale greyscale of more than 8 bits to 8 bits."""
    values = np.asarray(image).astype(np.float64)
    largest = values.max(initial=0)

    # The value that becomes white.
    white = 65535.0
    if image.mode == "I":
        white = next(2**bits - 1 for bits in (8, 16, 24, 31) if largest < 2**bits)
    elif image.mode == "F":
        white = 1 if largest <= 1 else 255

    # Values that are not numbers become black.
    levels = np.nan_to_num(values / white * 255).clip(0, 255)
    return Image.fromarray(levels.round().astype(np.uint8))


def cut_mosaic(sheet: Image.Image, side: int, count: int) -> NDArray[np.uint8]:
    """Cut the first ``count`` tiles (n, side, side, 3) of a picture that was filled row by row."""
    pixels = np.asarray(sheet)
    columns = pixels.shape[1] // side

    # Rows of tiles (rows, side, columns, side, 3), then tile by tile.
    rows = pixels.reshape(-1, side, columns, side, 3)
    tiles = rows.swapaxes(1, 2).reshape(-1, side, side, 3)
    return tiles[:count].copy()


def read_image(path: str | os.PathLike[str]) -> bytes:
    """Read the bytes of an image file."""
    name = os.fspath(path)
    try:
        status = Path(path).stat()
        if stat.S_ISDIR(status.st_mode):
            raise ImageError(name, "a folder, not an image")
        if not stat.S_ISREG(status.st_mode):  # a pipe would never end
            raise ImageError(name, "not a regular file")
        if status.st_size > MAX_BYTES:
            raise ImageError(name, f"too large ({status.st_size / 2**30:.1f} GB)")
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise ImageError(name, "no such file") from None
    except ImageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in a path
        reason = getattr(error, "strerror", None) or error
        raise ImageError(name, f"cannot be read ({reason})") from error
    if not data:
        raise ImageError(name, "an empty file")
    return data
