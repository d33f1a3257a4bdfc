"""Crops: drawn as defined, resampled as Pillow does."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cliquetta.data.crops import (
    crop_image,
    crop_tensors,
    resized_crop_boxes,
    zoom_crop_boxes,
)
from tests._helpers.tolerance import FEATURE, sampling
from tests._helpers.trees import random_pixels


@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_boxes_lie_inside_the_image(height: int, width: int, seed: int) -> None:
    boxes = resized_crop_boxes(height, width, 20, np.random.default_rng(seed))
    assert np.all(
        (boxes.rows >= 1) & (boxes.top >= 0) & (boxes.top + boxes.rows <= height)
    )
    assert np.all(
        (boxes.columns >= 1) & (boxes.left >= 0) & (boxes.left + boxes.columns <= width)
    )


def test_areas_and_ratios_are_drawn_as_defined() -> None:
    boxes = resized_crop_boxes(500, 500, 20_000, np.random.default_rng(0))
    share = boxes.rows * boxes.columns / 500**2
    ratio = np.log(boxes.columns / boxes.rows)
    assert 0.079 < share.min() < 0.085
    assert 0.98 < share.max() <= 1.0
    assert np.abs(ratio).max() == pytest.approx(np.log(4 / 3), abs=0.02)
    small = (
        share < 0.5
    )  # where every draw fits, the area is uniform and the log ratio too
    assert np.mean(share[small] < 0.29) == pytest.approx(
        0.5, abs=sampling(0.5, small.sum())
    )
    assert ratio[small].mean() == pytest.approx(0, abs=sampling(0.17, small.sum()))
    assert boxes.mirrored.mean() == pytest.approx(0.5, abs=sampling(0.5, 20_000))
    middle = boxes.rows < 250
    top = (boxes.top[middle] + 0.5) / (500 - boxes.rows[middle] + 1)
    assert top.mean() == pytest.approx(0.5, abs=sampling(0.29, middle.sum()))


@pytest.mark.parametrize(
    ("shape", "crop"), [((10, 1000), (10, 13)), ((1000, 10), (13, 10))]
)
def test_hopeless_shapes_fall_back_to_the_centre(shape: Any, crop: Any) -> None:
    (height, width), (rows, columns) = shape, crop
    boxes = resized_crop_boxes(
        height, width, 50, np.random.default_rng(0), scale=(0.9, 1.0)
    )
    assert set(boxes.rows) == {rows} and set(boxes.top) == {(height - rows) // 2}
    assert set(boxes.columns) == {columns} and set(boxes.left) == {
        (width - columns) // 2
    }


def test_zoom_crops_reach_every_corner() -> None:
    boxes = zoom_crop_boxes(40, 60, 5000, np.random.default_rng(0), size=32, zoom=1.25)
    assert (boxes.height, boxes.width) == (40, 60)
    assert (boxes.top.min(), boxes.top.max()) == (0, 8)
    assert (boxes.left.min(), boxes.left.max()) == (0, 28)


@pytest.mark.parametrize(
    ("height", "width"), [(32, 32), (20, 45), (70, 33), (1, 1), (1, 7)]
)
@pytest.mark.parametrize("kind", ["resized", "zoom"])
def test_matrices_resample_as_pillow_does(height: int, width: int, kind: str) -> None:
    image = random_pixels(height, width, 3)
    generator = np.random.default_rng(1)
    if kind == "resized":
        boxes = resized_crop_boxes(height, width, 30, generator)
    else:
        boxes = zoom_crop_boxes(height, width, 30, generator, size=24, zoom=1.4)
    expected = crop_image(Image.fromarray(image), boxes, 24).astype(int)
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    result = (
        crop_tensors(pixels, [boxes], 24, eight_bit=True)[0].permute(0, 2, 3, 1).numpy()
    )
    assert np.array_equal(result, expected)
    smooth = crop_tensors(pixels, [boxes], 24)[0].permute(0, 2, 3, 1).numpy()
    assert np.abs(smooth - expected).max() <= 1.5


def test_crops_let_gradients_through() -> None:
    images = torch.rand(1, 3, 16, 16, requires_grad=True)
    boxes = [resized_crop_boxes(16, 16, 4, np.random.default_rng(0))]
    crop_tensors(images, boxes, 8).sum().backward()
    # rows of weights sum to one: every output pixel hands out a gradient of one
    assert images.grad.sum() == pytest.approx(4 * 3 * 8 * 8, rel=FEATURE)


def test_crops_are_pillows_own_within_one_level() -> None:
    image = Image.fromarray(random_pixels(50, 41, 3))
    boxes = resized_crop_boxes(50, 41, 40, np.random.default_rng(2))
    ours = crop_image(image, boxes, 24).astype(int)
    for view in range(40):
        left, top = int(boxes.left[view]), int(boxes.top[view])
        corner = (left + int(boxes.columns[view]), top + int(boxes.rows[view]))
        crop = image.crop((left, top, *corner)).resize(
            (24, 24), Image.Resampling.BILINEAR
        )
        expected = np.asarray(crop).astype(int)
        expected = expected[:, ::-1] if boxes.mirrored[view] else expected
        assert (
            np.abs(ours[view] - expected).max() <= 1
        )  # Pillow 13 may take the passes in turn
