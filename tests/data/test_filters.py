"""Filters against scipy's."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage

from cliquetta.data import filters
from tests._helpers.tolerance import FEATURE, SUM, rounding

# sums over pixels at float32 coordinates of up to 32
PIXELS = rounding(torch.float32, 64, 32)
generator: Any = np.random.default_rng


@pytest.mark.parametrize(
    ("rule", "scipys"), [("nearest", "nearest"), ("symmetric", "reflect")]
)
@pytest.mark.parametrize("sigma", [0.05, 0.4, 1.5, 9.0])
def test_gaussian_blur_equals_scipy(rule: str, scipys: str, sigma: float) -> None:
    x = generator(3).random((2, 17, 23, 3)).astype(np.float32)
    expected = ndimage.gaussian_filter(
        x,
        (0, sigma, sigma, 0),
        mode=scipys,
        truncate=3,
    )
    blurred = filters.gaussian_blur(x, sigma, rule, truncate=3)
    assert np.abs(blurred - expected).max() < SUM


@pytest.mark.parametrize("factor", [1.0, 1.07, 1.31, 2.5, 4.5])
def test_zoom_equals_scipy(factor: float) -> None:
    x = generator(4).random((32, 32, 2)).astype(np.float32)
    # enlarge the middle, then cut as much out of it as there was before
    side = int(np.ceil(32 / factor))
    start = (32 - side) // 2
    middle = x[start : start + side, start : start + side]
    enlarged = ndimage.zoom(middle, (factor, factor, 1), order=1)
    cut = (enlarged.shape[0] - 32) // 2
    expected = enlarged[cut : cut + 32, cut : cut + 32]

    # ours takes planes of a batch
    planes = np.moveaxis(x, 2, 0)[None]
    (zoomed,) = filters.zoom(planes, factor)
    ours = np.moveaxis(zoomed, 0, 2)
    assert np.abs(ours - expected).max() < SUM


@pytest.mark.parametrize(
    ("radius", "softness", "shape"),
    [(1.0, 0.2, (20, 14)), (2.0, 0.5, (20, 14)), (10, 0.5, (40, 70))],
)
def test_convolution_equals_scipy(
    radius: float, softness: float, shape: tuple[int, int]
) -> None:
    x = generator(5).random((2, *shape, 3)).astype(np.float32)
    kernel = filters.disk_kernel(radius, softness)
    # as OpenCV has it: its edge is mirrored
    assert kernel.sum() == pytest.approx(1, abs=0.02)
    expected = ndimage.correlate(x, kernel[None, :, :, None], mode="mirror")
    convolved = filters.convolve(x, kernel)
    assert np.abs(convolved - expected).max() < FEATURE


@pytest.mark.parametrize(
    ("rule", "scipys"), [("symmetric", "reflect"), ("reflect", "mirror")]
)
def test_sampling_equals_scipy(rule: str, scipys: str) -> None:
    x = generator(6).random((1, 9, 12, 1)).astype(np.float32)
    # points in the picture and outside of it
    down = generator(7).uniform(-6, 16, (1, 9, 12))
    across = generator(8).uniform(-6, 16, (1, 9, 12))
    expected = ndimage.map_coordinates(
        x[0, ..., 0],
        [down[0], across[0]],
        order=1,
        mode=scipys,
    )
    sampled = filters.sample(x, down, across, rule)
    assert np.abs(sampled[0, ..., 0] - expected).max() < FEATURE


def test_motion_blur_of_a_point_points_the_right_way() -> None:
    x = np.zeros((3, 21, 21, 1), np.float32)
    x[:, 10, 10] = 1
    angles = np.array([0.0, 90.0, 45.0], np.float32)
    out = filters.motion_blur(x, 4, 2.0, angles)[..., 0]
    to_the_left, upwards, slanted = out

    weights = np.exp(-0.5 * (np.arange(9) / 2) ** 2)
    weights /= weights.sum()
    trail = weights[::-1]
    assert np.abs(to_the_left[10, 2:11] - trail).max() < PIXELS
    assert np.abs(upwards[2:11, 10] - trail).max() < PIXELS

    # At 45 degrees steps 1 and 2 (0.71 and 1.41 pixels each way) fall on the same
    # pixel.
    diagonal = [slanted[10 - step, 10 - step] for step in range(4)]
    expected = [
        weights[0],
        weights[1] + weights[2],
        weights[3],
        weights[4],
    ]
    assert diagonal == pytest.approx(expected, abs=PIXELS)

    # no light is lost
    assert out.sum(axis=(1, 2)) == pytest.approx(1, abs=9 * PIXELS)


def test_plasma_fills_the_range_and_is_smoother_the_faster_it_decays() -> None:
    """Clouds of 64 x 64 points; steps between neighbours are small beside the range."""
    steps = {}
    for decay in (1.2, 3.0):
        draws = filters.Draws([generator(0)])
        cloud = filters.plasma(draws, 64, 64, decay)[0, :, :, 0]
        assert cloud.min() == 0.0
        assert cloud.max() == 1.0
        steps[decay] = np.abs(np.diff(cloud, axis=0)).mean()
    assert steps[3.0] < steps[1.2] < 0.2
