"""Corruptions against other libraries, formulas worked by hand, and properties."""

from __future__ import annotations

import colorsys
import io
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from cliquetta.data import filters
from cliquetta.data.bundled import load_bundled
from cliquetta.data.corruptions import CORRUPTIONS, SEVERITIES, STANDARD, corrupt, corrupt_batch
from cliquetta.data.distortions import elastic_transform, glass_blur
from cliquetta.data.filters import Draws
from cliquetta.errors import UnknownNameError
from tests._helpers.tolerance import FEATURE, SUM, rounding, sampling

ALL = list(CORRUPTIONS)
PIXELS = rounding(torch.float32, 64, 32)
"""Sums over pixels at float32 coordinates of up to 32."""


def generator(seed: int | tuple[int, ...] = 0) -> Any:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def pictures() -> Any:
    return load_bundled("test").images[::40]


@pytest.fixture(scope="module")
def large() -> Any:
    """A 224-pixel picture with detail of all scales."""
    tiles = load_bundled("test").images[:49].reshape(7, 7, 32, 32, 3)
    return tiles.swapaxes(1, 2).reshape(224, 224, 3).copy()


def distance(a: Any, b: Any) -> Any:
    return float(np.sqrt(((a.astype(float) - b.astype(float)) ** 2).mean(axis=(1, 2, 3))).mean())


def test_the_fifteen() -> None:
    assert len(STANDARD) == 15
    assert set(ALL) - set(STANDARD) == {"greyscale", "edges", "double_exposure"}


@pytest.mark.parametrize("name", ALL)
class TestEvery:
    @pytest.mark.parametrize("shape", [(1, 1), (2, 5), (33, 20), (50, 100)])
    def test_any_size_keeps_shape_and_input(self, name: str, shape: tuple[int, ...]) -> None:
        image = generator(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
        before = image.copy()
        for severity in (1, 5):
            out = corrupt(image, name, severity, generator())
            assert out.shape == image.shape
            assert out.dtype == np.uint8
        assert np.array_equal(image, before)

    def test_order_and_company_do_not_matter(self, name: str, pictures: Any) -> None:
        whole = corrupt_batch(pictures, name, 3, seed=5)
        order = generator(2).permutation(len(pictures))[:7]
        part = corrupt_batch(pictures[order], name, 3, seed=5, indices=order.tolist())
        assert np.abs(part.astype(int) - whole[order]).max() <= 1  # sums in another order
        assert (part == whole[order]).mean() > 0.999
        single = corrupt(pictures[4], name, 3, generator((5, 4)))
        assert np.abs(single.astype(int) - whole[4]).max() <= 1

    @pytest.mark.parametrize("severity", [0, 6, -1])
    def test_severity_out_of_range(self, name: str, severity: int, pictures: Any) -> None:
        with pytest.raises(ValueError, match="must be 1, 2, 3, 4 or 5"):
            corrupt_batch(pictures[:1], name, severity, seed=0)
        with pytest.raises(ValueError, match="must be 1, 2, 3, 4 or 5"):
            corrupt(pictures[0], name, severity, generator())


# By their published constants some do not move away from the original step by step: glass blur
# (3 and 5 blur more than the one before, which takes noise away), elastic (less shake, more
# ripples) and frost (from 3 on, less of the picture rather than more ice).
@pytest.mark.parametrize("name", sorted(set(ALL) - {"glass_blur", "elastic_transform", "frost"}))
def test_distance_grows_with_severity(name: Any, pictures: Any) -> None:
    far = [distance(corrupt_batch(pictures, name, s, seed=0), pictures) for s in SEVERITIES]
    assert far[0] > 0.5
    assert all(b > a - 0.05 for a, b in pairwise(far)), far
    assert far[4] > 1.4 * far[0]


@pytest.mark.parametrize(("side", "sigma"), [(32, 0.08), (224, 0.18)])
def test_gaussian_noise_has_the_published_spread(side: int, sigma: float) -> None:
    grey = np.full((side, side, 3), 128, np.uint8)
    stack = np.stack([corrupt(grey, "gaussian_noise", 3, generator(i)) for i in range(20)])
    assert stack.std() / 255 == pytest.approx(
        sigma, rel=0.01 + sampling(0.71, stack.size)
    )  # clipped
    assert stack.mean() == pytest.approx(
        128, abs=0.5 + sampling(255 * sigma, stack.size)
    )  # truncated


def test_shot_noise_has_poisson_variance() -> None:
    grey = np.full((64, 32, 32, 3), 102, np.uint8)
    out = corrupt_batch(grey, "shot_noise", 3, seed=0) / 255
    # A Poisson count of mean 0.4 * 100, divided by 100: variance 0.4 / 100.
    assert out.var() == pytest.approx(0.004, rel=0.01 + sampling(1.42, out.size))


def test_impulse_noise_sets_the_published_share() -> None:
    grey = np.full((64, 32, 32, 3), 128, np.uint8)
    out = corrupt_batch(grey, "impulse_noise", 5, seed=0)
    assert (out == 0).mean() == pytest.approx(0.035, abs=sampling(0.184, out.size))
    assert (out == 255).mean() == pytest.approx(0.035, abs=sampling(0.184, out.size))
    assert (out == 128).mean() == pytest.approx(0.93, abs=sampling(0.256, out.size))


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_brightness_equals_hsv_of_colorsys(severity: int, pictures: Any) -> None:
    image = pictures[3].copy()
    image[0, 0] = 0
    image[0, 1] = 255
    added = [0.05, 0.1, 0.15, 0.2, 0.3][severity - 1]
    expected = np.empty(image.shape)
    for place in np.ndindex(32, 32):
        h, s, v = colorsys.rgb_to_hsv(*(image[place] / 255))
        expected[place] = colorsys.hsv_to_rgb(h, s, min(v + added, 1))
    out = corrupt(image, "brightness", severity, generator())
    assert np.abs(out - 255 * expected).max() < 0.51


def test_contrast_by_formula(pictures: Any, large: Any) -> None:
    for image, share in ((pictures[0], 0.4), (large, 0.2)):
        mean = image.reshape(-1, 3).mean(axis=0)
        out = corrupt(image, "contrast", 3, generator())
        assert np.abs(out - ((image - mean) * share + mean)).max() < 0.51


def test_jpeg_is_pillows(pictures: Any, large: Any) -> None:
    for image, quality in ((pictures[0], 58), (large, 15)):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=quality)
        out = corrupt(image, "jpeg_compression", 3, generator())
        assert np.array_equal(out, np.asarray(Image.open(buffer)))


def test_pixelate_leaves_as_many_blocks(large: Any) -> None:
    out = corrupt(large, "pixelate", 2, generator())
    blocks = large.reshape(112, 2, 112, 2, 3).astype(float).mean(axis=(1, 3))
    assert np.abs(out[::2, ::2] - blocks).max() <= 1  # Pillow rounds after each axis
    assert np.array_equal(out[::2], out[1::2])
    assert np.array_equal(out[:, ::2], out[:, 1::2])


def test_defocus_of_a_point_is_a_disk() -> None:
    image = np.zeros((225, 225, 3), np.uint8)
    image[112, 112] = 255
    lit = corrupt(image, "defocus_blur", 1, generator())[..., 0] > 0
    y, x = np.mgrid[:225, :225] - 112
    assert np.array_equal(lit, y**2 + x**2 <= 9)


@pytest.mark.parametrize(("rule", "scipys"), [("nearest", "nearest"), ("symmetric", "reflect")])
@pytest.mark.parametrize("sigma", [0.05, 0.4, 1.5, 9.0])
def test_gaussian_blur_equals_scipy(rule: str, scipys: str, sigma: float) -> None:
    x = generator(3).random((2, 17, 23, 3)).astype(np.float32)
    expected = ndimage.gaussian_filter(x, (0, sigma, sigma, 0), mode=scipys, truncate=3)
    assert np.abs(filters.gaussian_blur(x, sigma, rule, truncate=3) - expected).max() < SUM


@pytest.mark.parametrize("factor", [1.0, 1.07, 1.31, 2.5, 4.5])
def test_zoom_equals_scipy(factor: float) -> None:
    x = generator(4).random((1, 32, 32, 2)).astype(np.float32)
    kept = int(np.ceil(32 / factor))
    start = (32 - kept) // 2
    middle = x[0, start : start + kept, start : start + kept]
    big = ndimage.zoom(middle, (factor, factor, 1), order=1)
    cut = (big.shape[0] - 32) // 2
    expected = big[cut : cut + 32, cut : cut + 32]
    planes = filters.zoom(np.moveaxis(x, 3, 1), factor)[0]
    assert np.abs(np.moveaxis(planes, 0, 2) - expected).max() < SUM


@pytest.mark.parametrize(
    ("radius", "softness", "shape"),
    [(1.0, 0.2, (20, 14)), (2.0, 0.5, (20, 14)), (10, 0.5, (40, 70))],
)
def test_convolution_equals_scipy(radius: float, softness: float, shape: tuple[int, int]) -> None:
    x = generator(5).random((2, *shape, 3)).astype(np.float32)
    kernel = filters.disk_kernel(radius, softness)
    expected = ndimage.correlate(x, kernel[None, :, :, None], mode="mirror")
    assert np.abs(filters.convolve(x, kernel) - expected).max() < FEATURE
    assert kernel.sum() == pytest.approx(1, abs=0.02)  # as OpenCV has it: its edge is mirrored


@pytest.mark.parametrize("rule", ["symmetric", "reflect"])
def test_sampling_equals_scipy(rule: str) -> None:
    x = generator(6).random((1, 9, 12, 1)).astype(np.float32)
    y, across = (generator(i).uniform(-6, 16, (1, 9, 12)) for i in (7, 8))
    scipys = {"symmetric": "reflect", "reflect": "mirror"}[rule]
    expected = ndimage.map_coordinates(x[0, ..., 0], [y[0], across[0]], order=1, mode=scipys)
    assert np.abs(filters.sample(x, y, across, rule)[0, ..., 0] - expected).max() < FEATURE


def test_motion_blur_of_a_point_points_the_right_way() -> None:
    x = np.zeros((3, 21, 21, 1), np.float32)
    x[:, 10, 10] = 1
    out = filters.motion_blur(x, 4, 2.0, np.array([0.0, 90.0, 45.0], np.float32))[..., 0]
    weights = np.exp(-0.5 * (np.arange(9) / 2) ** 2)
    weights /= weights.sum()
    assert np.abs(out[0, 10, 2:11][::-1] - weights).max() < PIXELS
    assert np.abs(out[1, 2:11, 10][::-1] - weights).max() < PIXELS
    # At 45 degrees steps 1 and 2 (0.71 and 1.41 pixels each way) fall on the same pixel.
    diagonal = [out[2, 10 - i, 10 - i] for i in range(4)]
    expected = [weights[0], weights[1] + weights[2], weights[3], weights[4]]
    assert diagonal == pytest.approx(expected, abs=PIXELS)
    assert out.sum(axis=(1, 2)) == pytest.approx(1, abs=9 * PIXELS)


def test_glass_copies_one_pixel_after_the_other() -> None:
    """Literally: from the last row on, each pixel takes what is at a near place by then."""
    height, width, reach, rounds = 9, 11, 2, 3
    x = generator(9).random((2, height, width, 3)).astype(np.float32)
    out = glass_blur(x, (0.0, reach, rounds), Draws([generator(i) for i in range(2)]))
    for number, picture in enumerate(x.copy()):
        places = [
            (row, column)
            for _ in range(rounds)
            for row in range(height - reach, reach, -1)
            for column in range(width - reach, reach, -1)
        ]
        moves = generator(number).integers(-reach, reach, (2, len(places)))
        for (row, column), down, right in zip(places, *moves, strict=True):
            picture[row, column] = picture[row + down, column + right]
        assert np.array_equal(out[number], picture)


def test_elastic_without_motion_is_the_picture(pictures: Any) -> None:
    x = pictures[:2].astype(np.float32) / 255
    out = elastic_transform(x, (0.0, 0.0, 0.0), Draws([generator(), generator()]))
    assert np.abs(out - x).max() < PIXELS


def test_elastic_affine_map_takes_the_corners_along() -> None:
    """Sampling the moved corners of a coordinate picture gives the corners themselves."""
    side = 64
    y, x = np.mgrid[:side, :side].astype(np.float32)
    coordinates = np.stack([x, y, y], axis=-1)[None]
    shake = 0.1
    out = elastic_transform(coordinates, (0.0, 0.0, shake), Draws([generator(9)]))[0]
    corners = np.array([[53, 53], [53, 11], [11, 11]])
    moved = corners + Draws([generator(9)]).uniform(-shake * side, shake * side, 3, 2)[0]
    for corner, (right, down) in zip(corners, moved, strict=True):
        if max(right, down) < side - 1 and min(right, down) > 0:
            found = ndimage.map_coordinates(out[..., 0], [[down], [right]], order=1)
            assert found[0] == pytest.approx(corner[0], abs=0.05)


def test_fog_by_formula(pictures: Any) -> None:
    image = pictures[7]
    cloud = filters.plasma(Draws([generator((0, 0))]), 32, 32, 2.0)[0].astype(float)
    peak = image.max() / 255
    expected = (image / 255 + 1.0 * cloud) * peak / (peak + 1.0)
    out = corrupt(image, "fog", 4, generator((0, 0)))
    assert np.abs(out - 255 * expected).max() < 0.51


def test_snow_only_brightens(pictures: Any) -> None:
    out = corrupt_batch(pictures, "snow", 3, seed=0)
    assert (out.astype(int) - pictures).min() >= -1


def test_double_exposure_is_pillows_blend_with_one_bundled_picture() -> None:
    images = load_bundled().images[:3]
    ship = Image.fromarray(load_bundled().images[1754])
    for index, image in enumerate(images):
        blended = np.asarray(Image.blend(Image.fromarray(image), ship, 0.5), int)
        ours = corrupt_batch(images, "double_exposure", 5, seed=7)[index].astype(int)
        assert np.abs(ours - blended).max() <= 1  # Pillow cuts off where we round


def test_greyscale_is_pillows_luma(pictures: Any) -> None:
    grey = corrupt(pictures[2], "greyscale", 5, generator())
    assert np.array_equal(grey[..., 0], grey[..., 1])
    expected = np.asarray(Image.fromarray(pictures[2]).convert("L")).astype(int)
    assert np.abs(grey[..., 0] - expected).max() <= 1


def test_edges_equal_scipys_sobel(pictures: Any) -> None:
    grey = pictures[2].astype(float) @ [0.299, 0.587, 0.114]
    slopes = [ndimage.sobel(grey, axis, mode="nearest") for axis in (0, 1)]
    strength = np.hypot(*slopes)
    expected = 255 * (1 - strength / strength.max())
    out = corrupt(pictures[2], "edges", 5, generator())
    assert np.abs(out - expected[..., None]).max() < 0.6


def test_constants_follow_the_size() -> None:
    noise = CORRUPTIONS["gaussian_noise"]
    assert noise.constants(1, 16) == noise.constants(1, 32) == (0.04,)
    assert noise.constants(1, 224) == noise.constants(1, 500) == (0.08,)
    middle = round((32 * 224) ** 0.5)
    assert noise.constants(1, middle)[0] == pytest.approx(0.06, abs=1e-3)


def test_unknown_name_names_the_nearest(pictures: Any) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'gaussian_noise'"):
        corrupt(pictures[0], "gausian_noise", 1, generator())
    with pytest.raises(UnknownNameError, match="did you mean 'fog'"):
        corrupt_batch(pictures, "fogg", 1, seed=0)


def test_wrong_pictures_are_refused(pictures: Any) -> None:
    with pytest.raises(ValueError, match="8-bit RGB"):
        corrupt(pictures[0] / 255.0, "fog", 1, generator())
    with pytest.raises(ValueError, match="8-bit RGB"):
        corrupt(pictures[0][..., :1], "fog", 1, generator())
    with pytest.raises(ValueError, match="one picture"):
        corrupt(pictures, "fog", 1, generator())
    with pytest.raises(ValueError, match="indices"):
        corrupt_batch(pictures, "fog", 1, seed=0, indices=[1, 2])


def test_large_batches_are_worked_in_chunks(monkeypatch: pytest.MonkeyPatch, pictures: Any) -> None:
    whole = corrupt_batch(pictures, "fog", 2, seed=3)
    monkeypatch.setattr("cliquetta.data.corruptions._CHUNK", 4 * 32 * 32 * 3)
    assert np.array_equal(corrupt_batch(pictures, "fog", 2, seed=3), whole)


def test_empty_batch() -> None:
    assert corrupt_batch(np.empty((0, 32, 32, 3), np.uint8), "snow", 1, seed=0).shape[0] == 0
