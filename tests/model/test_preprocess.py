"""Preprocessing against transformers (against torchvision: tests/parity), and itself."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from cliquetta.errors import UserError
from cliquetta.model.preprocess import Preprocess

# Odd differences on either side of the crop, enlarging and shrinking, squares, one
# pixel.
SHAPES = [
    (48, 64),
    (64, 47),
    (33, 50),
    (32, 32),
    (32, 35),
    (35, 32),
    (7, 9),
    (1, 1),
    (200, 131),
]
SHAPES += [(3, 40), (97, 64), (33, 33)]

# Before version 5 of transformers, the one on Pillow had the plain name.
PROCESSOR: Any = getattr(
    transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor
)


def photo(height: int, width: int, seed: int = 0) -> Any:
    pixels = np.random.default_rng(seed).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    return Image.fromarray(pixels)


def transformers_pixels(image: Any, size: int) -> Any:
    theirs = PROCESSOR(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )
    return theirs(
        image, return_tensors="pt", input_data_format="channels_last"
    ).pixel_values[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bit_equal_to_transformers(shape: tuple[int, int]) -> None:
    height, width = shape
    image = photo(height, width)
    pixels = Preprocess(32, crop_rounding="floor")(image)
    assert pixels.shape == (3, 32, 32)
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, transformers_pixels(image, 32))


def test_half_a_pixel_of_crop_is_rounded_to_even_or_down() -> None:
    """As torchvision does, whose pixels are compared in tests/parity, and as transformers does."""
    spare = (0, 1, 2, 3, 5, 7)
    assert [Preprocess.openai(8).offset(pixels) for pixels in spare] == [
        0,
        0,
        1,
        2,
        2,
        4,
    ]
    floor = Preprocess(8, crop_rounding="floor")
    assert [floor.offset(pixels) for pixels in spare] == [0, 0, 1, 1, 2, 3]


def test_ready_pictures_take_the_fast_path_to_the_same_bits() -> None:
    preprocess = Preprocess.openai(32)
    images = [photo(32, 32, seed) for seed in range(5)]
    one_by_one = torch.stack([preprocess(image) for image in images])
    assert torch.equal(preprocess.batch(images), one_by_one)

    arrays = np.stack([np.asarray(image) for image in images])
    assert torch.equal(preprocess.pixels(arrays), one_by_one)
    assert torch.equal(preprocess.pixels(torch.from_numpy(arrays)), one_by_one)


def test_no_pictures_are_an_empty_batch() -> None:
    assert Preprocess.openai(32).batch([]).shape == (0, 3, 32, 32)


def test_unnormalise_gives_every_level_back() -> None:
    preprocess = Preprocess(16)
    levels = (
        torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    )
    assert torch.equal(preprocess.unnormalise(preprocess.pixels(levels)), levels)
    assert preprocess.unnormalise(torch.full((3, 4, 4), 99.0)).shape == (4, 4, 3)


@pytest.mark.parametrize(
    "shape", [(2, 90), (90, 2), (1, 77), (77, 1), (3, 301)], ids=str
)
def test_very_long_pictures_come_out_like_any_other(shape: tuple[int, ...]) -> None:
    # waves of another length in every channel
    rows, columns = np.indices(shape)
    place = rows + columns
    waves = [128 + 100 * np.sin(place / period) for period in (3, 5, 9)]
    image = Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8))

    preprocess = Preprocess(8, crop_rounding="floor")
    ours = preprocess.unnormalise(preprocess(image))
    theirs = preprocess.unnormalise(transformers_pixels(image, 8))
    assert (ours.int() - theirs.int()).abs().max() <= 1


def test_the_longest_pictures_take_little_memory() -> None:
    preprocess = Preprocess(8, crop_rounding="floor")
    assert preprocess.picture(photo(1, 30_000)).size == (8, 8)


def test_squash_shows_all_of_the_picture() -> None:
    image = photo(20, 60)
    preprocess = Preprocess(16, resize="squash", interpolation="bilinear")
    squashed = preprocess.picture(image)
    expected = image.resize((16, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(np.asarray(squashed), np.asarray(expected))


def test_other_modes_are_made_rgb_before_resizing() -> None:
    palette = photo(40, 50).quantize(16)
    preprocess = Preprocess.openai(32)
    assert torch.equal(preprocess(palette), preprocess(palette.convert("RGB")))


def test_value_survives_json_and_tells_itself_apart() -> None:
    value = Preprocess(
        48,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.2, 0.1),
        crop_rounding="floor",
    )
    text = json.dumps(value.to_dict())
    twin = Preprocess.from_dict(json.loads(text))
    assert twin == value
    assert twin.fingerprint == value.fingerprint

    openai = Preprocess.openai(48)
    floor = Preprocess(48, crop_rounding="floor")
    fingerprints = {one.fingerprint for one in (value, openai, floor)}
    assert len(fingerprints) == 3


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((2, 8, 8, 3), np.float32), "uint8"),
        (np.zeros((2, 3, 8, 8), np.uint8), "uint8"),
        (np.zeros((8, 8, 3), np.uint8), "uint8"),
        (np.zeros((2, 9, 8, 3), np.uint8), "9 x 8"),
    ],
    ids=["floats", "channels first", "one picture", "another size"],
)
def test_pixels_of_another_shape_are_refused(pixels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocess(8).pixels(pixels)


def test_bad_values_are_refused() -> None:
    for values, message in (
        ({"size": 0}, "size"),
        ({"size": 8, "std": (0.0, 1.0, 1.0)}, "std"),
        ({"size": 8, "interpolation": "bicubik"}, "bicubic"),
        ({"size": 8, "crop_round": "floor"}, "crop_rounding"),
    ):
        with pytest.raises(UserError, match=message):
            Preprocess.from_dict(values)
