"""Each corruption against other libraries, formulas worked by hand and counted statistics."""

import colorsys
import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from cliquetta.data import filters
from cliquetta.data.bundled import load_bundled
from cliquetta.data.corruptions import corrupt_batch
from cliquetta.data.distortions import elastic_transform, glass_blur
from cliquetta.data.filters import Draws
from tests._helpers.tolerance import rounding, sampling
from tests._helpers.trees import saved

PICTURES = load_bundled("test").images[::40]
LARGE = load_bundled("test").images[:49].reshape(7, 7, 32, 32, 3).swapaxes(1, 2)
LARGE = LARGE.reshape(224, 224, 3)  # detail of all scales
# sums over pixels at float32 coordinates of up to 32
PIXELS = rounding(torch.float32, 64, 32)


def corrupt(image: Any, name: str, severity: int, seed: int = 0) -> Any:
    return corrupt_batch(image[None], name, severity, seed)[0]


generator = np.random.default_rng


@pytest.mark.parametrize(("side", "sigma"), [(32, 0.08), (224, 0.18)])
def test_gaussian_noise_has_the_published_spread(side: int, sigma: float) -> None:
    grey = np.full((side, side, 3), 128, np.uint8)
    stack = np.stack([corrupt(grey, "gaussian_noise", 3, seed=i) for i in range(20)])
    # values are clipped, and were once cut off instead of rounded
    assert stack.std() / 255 == pytest.approx(
        sigma, rel=0.01 + sampling(0.71, stack.size)
    )
    assert stack.mean() == pytest.approx(
        128, abs=0.5 + sampling(255 * sigma, stack.size)
    )


def test_shot_noise_has_poisson_variance() -> None:
    grey = np.full((64, 32, 32, 3), 102, np.uint8)
    out = corrupt_batch(grey, "shot_noise", 3, seed=0) / 255
    # A Poisson count of mean 0.4 * 100, divided by 100: variance 0.4 / 100.
    tolerance = 0.01 + sampling(1.42, out.size)
    assert out.var() == pytest.approx(0.004, rel=tolerance)


def test_impulse_noise_sets_the_published_share() -> None:
    grey = np.full((64, 32, 32, 3), 128, np.uint8)
    out = corrupt_batch(grey, "impulse_noise", 5, seed=0)
    for level, share, spread in (
        (0, 0.035, 0.184),
        (255, 0.035, 0.184),
        (128, 0.93, 0.256),
    ):
        assert (out == level).mean() == pytest.approx(
            share, abs=sampling(spread, out.size)
        )


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_brightness_equals_hsv_of_colorsys(severity: int) -> None:
    image = PICTURES[3].copy()
    # also black, which has no hue, and white, which cannot become brighter
    image[0, 0] = 0
    image[0, 1] = 255
    added = [0.05, 0.1, 0.15, 0.2, 0.3][severity - 1]
    expected = np.empty(image.shape)
    for pixel in np.ndindex(32, 32):
        red, green, blue = image[pixel] / 255
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        brighter = min(value + added, 1)
        expected[pixel] = colorsys.hsv_to_rgb(hue, saturation, brighter)
    out = corrupt(image, "brightness", severity)
    assert np.abs(out - 255 * expected).max() < 0.51


@pytest.mark.parametrize(
    ("image", "share"), [(PICTURES[0], 0.4), (LARGE, 0.2)], ids=["small", "large"]
)
def test_contrast_by_formula(image: Any, share: float) -> None:
    mean = image.reshape(-1, 3).mean(axis=0)
    expected = (image - mean) * share + mean
    out = corrupt(image, "contrast", 3)
    assert np.abs(out - expected).max() < 0.51


@pytest.mark.parametrize(
    ("image", "quality"), [(PICTURES[0], 58), (LARGE, 15)], ids=["small", "large"]
)
def test_jpeg_is_pillows(image: Any, quality: int) -> None:
    data = saved(Image.fromarray(image), "JPEG", quality=quality)
    expected = np.asarray(Image.open(io.BytesIO(data)))
    out = corrupt(image, "jpeg_compression", 3)
    assert np.array_equal(out, expected)


def test_pixelate_leaves_as_many_blocks() -> None:
    out = corrupt(LARGE, "pixelate", 2)
    # blocks of two by two pixels: the rows and columns of a pair are equal
    assert np.array_equal(out[::2], out[1::2])
    assert np.array_equal(out[:, ::2], out[:, 1::2])

    pairs = LARGE.reshape(112, 2, 112, 2, 3).astype(float)
    means = pairs.mean(axis=(1, 3))
    of_blocks = out[::2, ::2]
    assert np.abs(of_blocks - means).max() <= 1  # Pillow rounds after each axis


def test_defocus_of_a_point_is_a_disk() -> None:
    radius = 3
    image = np.zeros((225, 225, 3), np.uint8)
    image[112, 112] = 255
    out = corrupt(image, "defocus_blur", 1)
    lit = out[..., 0] > 0
    y, x = np.mgrid[:225, :225] - 112
    disk = y**2 + x**2 <= radius**2
    assert np.array_equal(lit, disk)


def test_glass_copies_one_pixel_after_the_other() -> None:
    """Literally: from the last row on, each pixel gets the value of a near one by then."""
    height = 9
    width = 11
    reach = 2
    rounds = 3
    pictures = generator(9).random((2, height, width, 3)).astype(np.float32)
    draws = Draws([generator(0), generator(1)])
    out = glass_blur(pictures, (0.0, reach, rounds), draws)

    one_round = [
        (row, column)
        for row in range(height - reach, reach, -1)
        for column in range(width - reach, reach, -1)
    ]
    positions = one_round * rounds
    for number, picture in enumerate(pictures.copy()):
        moves = generator(number).integers(-reach, reach, (2, len(positions)))
        for (row, column), (down, right) in zip(positions, moves.T, strict=True):
            picture[row, column] = picture[row + down, column + right]
        assert np.array_equal(out[number], picture)


def test_elastic_affine_map_moves_the_corners() -> None:
    """Sampling the moved corners of a coordinate picture gives the corners themselves."""
    side = 64
    shake = 0.1
    y, x = np.mgrid[:side, :side].astype(np.float32)
    coordinates = np.stack([x, y, y], axis=-1)[None]
    out = elastic_transform(
        coordinates,
        (0.0, 0.0, shake),
        Draws([generator(9)]),
    )
    out_x = out[0, ..., 0]

    corners = np.array([[53, 53], [53, 11], [11, 11]])
    # the same draws again: how far each corner moves
    moves = Draws([generator(9)]).uniform(-shake * side, shake * side, 3, 2)[0]
    moved = corners + moves
    for corner, (right, down) in zip(corners, moved, strict=True):
        value = ndimage.map_coordinates(out_x, [[down], [right]], order=1)
        assert value[0] == pytest.approx(corner[0], abs=0.05)


def test_fog_by_formula() -> None:
    image = PICTURES[7]
    thickness = 1.0
    draws = Draws([generator((0, 0))])
    cloud = filters.plasma(draws, 32, 32, 2.0)[0].astype(float)
    peak = image.max() / 255
    foggy = image / 255 + thickness * cloud
    # as bright as before at its brightest
    expected = foggy * peak / (peak + thickness)
    out = corrupt(image, "fog", 4)
    assert np.abs(out - 255 * expected).max() < 0.51


def test_snow_only_brightens() -> None:
    out = corrupt_batch(PICTURES, "snow", 3, seed=0)
    assert (out.astype(int) - PICTURES).min() >= -1


def test_double_exposure_is_pillows_blend_with_one_bundled_picture() -> None:
    bundled = load_bundled().images
    images = bundled[:3]
    ship = Image.fromarray(bundled[1754])
    out = corrupt_batch(images, "double_exposure", 5, seed=7).astype(int)
    for image, ours in zip(images, out, strict=True):
        blended = Image.blend(Image.fromarray(image), ship, 0.5)
        expected = np.asarray(blended, int)
        assert np.abs(ours - expected).max() <= 1  # Pillow cuts off where we round


def test_greyscale_is_pillows_luma() -> None:
    image = PICTURES[2]
    grey = corrupt(image, "greyscale", 5)
    red, green, blue = np.moveaxis(grey, -1, 0)
    assert np.array_equal(red, green)
    assert np.array_equal(red, blue)

    luma = Image.fromarray(image).convert("L")
    expected = np.asarray(luma).astype(int)
    assert np.abs(red - expected).max() <= 1


def test_edges_equal_scipys_sobel() -> None:
    luma = PICTURES[2].astype(float) @ [0.299, 0.587, 0.114]
    down = ndimage.sobel(luma, 0, mode="nearest")
    across = ndimage.sobel(luma, 1, mode="nearest")
    strength = np.hypot(down, across)
    # black lines on white, the strongest edge is black
    expected = 255 * (1 - strength / strength.max())
    out = corrupt(PICTURES[2], "edges", 5)
    assert np.abs(out - expected[..., None]).max() < 0.6
