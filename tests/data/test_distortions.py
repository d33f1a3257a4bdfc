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
PIXELS = rounding(
    torch.float32, 64, 32
)  # sums over pixels at float32 coordinates of up to 32


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
    assert out.var() == pytest.approx(0.004, rel=0.01 + sampling(1.42, out.size))


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
    image[0, 0], image[0, 1] = 0, 255
    added = [0.05, 0.1, 0.15, 0.2, 0.3][severity - 1]
    expected = np.empty(image.shape)
    for pixel in np.ndindex(32, 32):
        h, s, v = colorsys.rgb_to_hsv(*(image[pixel] / 255))
        expected[pixel] = colorsys.hsv_to_rgb(h, s, min(v + added, 1))
    out = corrupt(image, "brightness", severity)
    assert np.abs(out - 255 * expected).max() < 0.51


def test_contrast_by_formula() -> None:
    for image, share in ((PICTURES[0], 0.4), (LARGE, 0.2)):
        mean = image.reshape(-1, 3).mean(axis=0)
        out = corrupt(image, "contrast", 3)
        assert np.abs(out - ((image - mean) * share + mean)).max() < 0.51


def test_jpeg_is_pillows() -> None:
    for image, quality in ((PICTURES[0], 58), (LARGE, 15)):
        file = io.BytesIO(saved(Image.fromarray(image), "JPEG", quality=quality))
        out = corrupt(image, "jpeg_compression", 3)
        assert np.array_equal(out, np.asarray(Image.open(file)))


def test_pixelate_leaves_as_many_blocks() -> None:
    out = corrupt(LARGE, "pixelate", 2)
    blocks = LARGE.reshape(112, 2, 112, 2, 3).astype(float).mean(axis=(1, 3))
    assert np.abs(out[::2, ::2] - blocks).max() <= 1  # Pillow rounds after each axis
    assert np.array_equal(out[::2], out[1::2])
    assert np.array_equal(out[:, ::2], out[:, 1::2])


def test_defocus_of_a_point_is_a_disk() -> None:
    image = np.zeros((225, 225, 3), np.uint8)
    image[112, 112] = 255
    lit = corrupt(image, "defocus_blur", 1)[..., 0] > 0
    y, x = np.mgrid[:225, :225] - 112
    assert np.array_equal(lit, y**2 + x**2 <= 9)


def test_glass_copies_one_pixel_after_the_other() -> None:
    """Literally: from the last row on, each pixel gets the value of a near one by then."""
    height, width, reach, rounds = 9, 11, 2, 3
    x = generator(9).random((2, height, width, 3)).astype(np.float32)
    out = glass_blur(x, (0.0, reach, rounds), Draws([generator(i) for i in range(2)]))
    for number, picture in enumerate(x.copy()):
        positions = [
            (row, column)
            for _ in range(rounds)
            for row in range(height - reach, reach, -1)
            for column in range(width - reach, reach, -1)
        ]
        moves = generator(number).integers(-reach, reach, (2, len(positions)))
        for (row, column), down, right in zip(positions, *moves, strict=True):
            picture[row, column] = picture[row + down, column + right]
        assert np.array_equal(out[number], picture)


def test_elastic_affine_map_moves_the_corners() -> None:
    """Sampling the moved corners of a coordinate picture gives the corners themselves."""
    side = 64
    y, x = np.mgrid[:side, :side].astype(np.float32)
    coordinates = np.stack([x, y, y], axis=-1)[None]
    shake = 0.1
    out = elastic_transform(coordinates, (0.0, 0.0, shake), Draws([generator(9)]))[0]
    corners = np.array([[53, 53], [53, 11], [11, 11]])
    moved = (
        corners + Draws([generator(9)]).uniform(-shake * side, shake * side, 3, 2)[0]
    )
    for corner, (right, down) in zip(corners, moved, strict=True):
        value = ndimage.map_coordinates(out[..., 0], [[down], [right]], order=1)
        assert value[0] == pytest.approx(corner[0], abs=0.05)


def test_fog_by_formula() -> None:
    image = PICTURES[7]
    cloud = filters.plasma(Draws([generator((0, 0))]), 32, 32, 2.0)[0].astype(float)
    peak = image.max() / 255
    expected = (image / 255 + 1.0 * cloud) * peak / (peak + 1.0)
    out = corrupt(image, "fog", 4)
    assert np.abs(out - 255 * expected).max() < 0.51


def test_snow_only_brightens() -> None:
    out = corrupt_batch(PICTURES, "snow", 3, seed=0)
    assert (out.astype(int) - PICTURES).min() >= -1


def test_double_exposure_is_pillows_blend_with_one_bundled_picture() -> None:
    images = load_bundled().images[:3]
    ship = Image.fromarray(load_bundled().images[1754])
    for index, image in enumerate(images):
        blended = np.asarray(Image.blend(Image.fromarray(image), ship, 0.5), int)
        ours = corrupt_batch(images, "double_exposure", 5, seed=7)[index].astype(int)
        assert np.abs(ours - blended).max() <= 1  # Pillow cuts off where we round


def test_greyscale_is_pillows_luma() -> None:
    grey = corrupt(PICTURES[2], "greyscale", 5)
    assert np.array_equal(grey[..., 0], grey[..., 1])
    expected = np.asarray(Image.fromarray(PICTURES[2]).convert("L")).astype(int)
    assert np.abs(grey[..., 0] - expected).max() <= 1


def test_edges_equal_scipys_sobel() -> None:
    grey = PICTURES[2].astype(float) @ [0.299, 0.587, 0.114]
    slopes = [ndimage.sobel(grey, axis, mode="nearest") for axis in (0, 1)]
    strength = np.hypot(*slopes)
    expected = 255 * (1 - strength / strength.max())
    out = corrupt(PICTURES[2], "edges", 5)
    assert np.abs(out - expected[..., None]).max() < 0.6
