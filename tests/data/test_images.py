"""Every kind of picture, and every kind of file that is none."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image, features

from cliquetta.data.images import ImageError, open_image
from tests._helpers.malformed import chunk, png
from tests._helpers.trees import exif_of, random_pixels, saved


def stored() -> dict[str, tuple[Any, Any]]:
    """Files of every kind, and the pixels that they show."""
    rgb = random_pixels(12, 20, 3)
    rgba = random_pixels(12, 20, 4)
    la = random_pixels(12, 20, 2)
    # transparent on the left: it is dropped, not blended
    alpha = np.arange(20) * 12
    rgba[..., -1] = alpha
    la[..., -1] = alpha

    grey = random_pixels(12, 20)
    black_or_white = (grey > 127) * np.uint8(255)
    one_bit = Image.fromarray(black_or_white).convert("1", dither=Image.Dither.NONE)

    colours = random_pixels(4, 3)
    index = np.random.default_rng(1).integers(0, 4, (6, 7), dtype=np.uint8)
    palette = Image.fromarray(index, "P")
    palette.putpalette(colours.tobytes())
    shades = b"\x00\x80\xff\x10"

    damaged = b"Exif\x00\x00II*\x00\xff\xff\xff\x7fnonsense"
    red = Image.new("RGB", (4, 4), "red")
    blue = Image.new("RGB", (4, 4), "blue")
    return {
        "damaged EXIF": (saved(Image.fromarray(rgb), "PNG", exif=damaged), rgb),
        "RGBA": (saved(Image.fromarray(rgba, "RGBA"), "PNG"), rgba[..., :3]),
        "LA": (saved(Image.fromarray(la, "LA"), "PNG"), as_rgb(la[..., 0])),
        "palette": (saved(palette, "PNG"), colours[index]),
        "clear colour": (saved(palette, "PNG", transparency=1), colours[index]),
        "clear colours": (saved(palette, "PNG", transparency=shades), colours[index]),
        "grey": (saved(Image.fromarray(grey), "PNG"), as_rgb(grey)),
        "one bit": (saved(one_bit, "PNG"), as_rgb(black_or_white)),
        "first frame": (
            saved(red, "GIF", save_all=True, append_images=[blue]),
            np.asarray(red),
        ),
    }


def as_rgb(grey: Any) -> Any:
    return np.stack([grey, grey, grey], axis=-1)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(("data", "pixels"), stored().values(), ids=stored())
def test_a_path_and_bytes_give_the_colours_that_are_stored(
    data: bytes, pixels: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    for source in (path, str(path), data):
        image = open_image(source)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_unless_switched_off(orientation: Any) -> None:
    upright = random_pixels(12, 20, 3)
    # What a camera held that way stores, from the definition of the tag.
    turn = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: a.swapaxes(0, 1)[::-1],
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: a[::-1].swapaxes(0, 1),
    }[orientation]
    stored = np.ascontiguousarray(turn(upright))
    data = saved(Image.fromarray(stored), "PNG", exif=exif_of(orientation))
    assert np.array_equal(np.asarray(open_image(data)), upright)
    assert np.array_equal(np.asarray(open_image(data, exif=False)), stored)


def test_cmyk_by_its_formula() -> None:
    pixels = random_pixels(12, 20, 4)
    ink = pixels.astype(float)
    colours = ink[..., :3]
    black = ink[..., 3:]
    expected = (255 - colours) * (255 - black) / 255

    image = open_image(saved(Image.fromarray(pixels, "CMYK"), "TIFF"))
    levels = np.asarray(image).astype(float)
    assert np.abs(levels - expected).max() <= 1


@pytest.mark.parametrize(
    ("kind", "order"), [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", ">u2")]
)
def test_sixteen_bits_are_scaled_not_clipped(kind: str, order: str) -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    data = saved(Image.fromarray(values.astype(order)), kind)
    levels = np.asarray(open_image(data))
    # 65535 = 255 * 257
    expected = np.round(values / 257).astype(np.uint8)
    assert np.array_equal(levels, as_rgb(expected))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 255]], dtype=np.int32), [0, 255]),
        (np.array([[-5, 32768, 65535]], dtype=np.int32), [0, 128, 255]),
        (np.array([[0, 2**30, 2**31 - 1]], dtype=np.int32), [0, 128, 255]),
        (np.array([[0, 0.5, 1]], dtype=np.float32), [0, 128, 255]),
        (np.array([[0, 100, 255]], dtype=np.float32), [0, 100, 255]),
    ],
)
def test_integers_and_floats(values: Any, expected: Any) -> None:
    levels = np.asarray(open_image(saved(Image.fromarray(values), "TIFF")))
    assert levels[0, :, 0].tolist() == expected


BAD_FILES = {
    "empty.jpg": (b"", "empty file"),
    "text.jpg": (b"this is not a picture\n" * 20, "not an image"),
    "truncated.jpg": (
        saved(Image.fromarray(random_pixels(200, 200, 3)), "JPEG")[:9000],
        "truncated",
    ),
    "truncated.png": (
        saved(Image.fromarray(random_pixels(99, 99, 3)), "PNG")[:5000],
        "truncated",
    ),
    "header.png": (png(30, 30, chunk(b"IDAT", bytes(9))), "damaged or truncated"),
    "bomb.png": (png(20_000, 20_000), "too large"),
    "large.png": (
        png(10_001, 10_000),
        r"too large \(10001 x 10000, more than 100,000,000",
    ),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named_with_the_reason(tmp_path: Path, name: str) -> None:
    data, reason = BAD_FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ImageError, match=f"{path}.*{reason}"):
        open_image(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="nowhere"):
        open_image(tmp_path / "nowhere.png")
    with pytest.raises(ImageError, match="a folder"):
        open_image(tmp_path)


def test_the_smallest_picture_is_read() -> None:
    pixel = saved(Image.new("RGB", (1, 1), "red"), "PNG")
    assert open_image(pixel).size == (1, 1)


def test_a_picture_above_the_limit_is_refused() -> None:
    data = saved(Image.new("RGB", (10, 10)), "PNG")
    assert open_image(data, max_pixels=100).size == (10, 10)
    with pytest.raises(ImageError, match="10 x 10"):
        open_image(data, max_pixels=99)


HALVES = np.zeros((40, 60, 3), np.uint8)
HALVES[:, :30] = (200, 30, 40)
HALVES[:, 30:] = (20, 160, 220)


def test_heif_is_read_as_pillow_heif_wrote_it() -> None:
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(HALVES)).save(file, quality=95)
    data = file.getvalue()
    result = np.asarray(open_image(data))
    assert result.shape == HALVES.shape
    assert np.abs(result.astype(float) - HALVES).mean() < 2
    # HEIF is among the formats that untrusted images may have
    untrusted = open_image(data, untrusted=True)
    assert np.array_equal(np.asarray(untrusted), result)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_avif_is_read_as_pillow_wrote_it() -> None:
    data = saved(Image.fromarray(HALVES), "AVIF")
    result = np.asarray(open_image(data))
    assert result.shape == HALVES.shape
    assert np.abs(result.astype(float) - HALVES).mean() < 3


@pytest.mark.parametrize(
    ("size", "reduced"),
    [
        ((447, 600), (447, 600)),
        ((448, 600), (224, 300)),
        ((900, 2000), (225, 500)),
        ((224, 2000), (224, 2000)),
    ],
    ids=["too small", "half", "a quarter", "too narrow"],
)
def test_a_jpeg_may_be_decoded_at_a_part_of_its_size(
    size: tuple[int, int], reduced: tuple[int, int]
) -> None:
    colour = (200, 100, 50)
    data = saved(Image.new("RGB", size, colour), "JPEG")
    assert open_image(data).size == size
    small = open_image(data, shorter=224)
    assert small.size == reduced
    assert np.abs(np.asarray(small).astype(int) - colour).max() <= 3


def test_a_png_is_never_decoded_at_a_part_of_its_size() -> None:
    data = saved(Image.new("RGB", (900, 2000)), "PNG")
    assert open_image(data, shorter=224).size == (900, 2000)
