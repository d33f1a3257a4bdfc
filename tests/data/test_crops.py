"""Crops: drawn as defined, resampled as Pillow does."""

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
    bottom = boxes.top + boxes.rows
    right = boxes.left + boxes.columns
    assert np.all(boxes.rows >= 1)
    assert np.all(boxes.top >= 0)
    assert np.all(bottom <= height)
    assert np.all(boxes.columns >= 1)
    assert np.all(boxes.left >= 0)
    assert np.all(right <= width)


def test_areas_and_ratios_are_drawn_as_defined() -> None:
    count = 20_000
    boxes = resized_crop_boxes(500, 500, count, np.random.default_rng(0))
    share = boxes.rows * boxes.columns / 500**2
    ratio = np.log(boxes.columns / boxes.rows)
    assert 0.079 < share.min() < 0.085
    assert 0.98 < share.max() <= 1.0
    assert np.abs(ratio).max() == pytest.approx(np.log(4 / 3), abs=0.02)
    assert boxes.mirrored.mean() == pytest.approx(0.5, abs=sampling(0.5, count))

    # where every draw fits, the area is uniform and the log ratio too
    small = share < 0.5
    number = small.sum()
    lower_half = share[small] < 0.29
    assert np.mean(lower_half) == pytest.approx(0.5, abs=sampling(0.5, number))
    assert ratio[small].mean() == pytest.approx(0, abs=sampling(0.17, number))

    # where there is room, the crop lies anywhere
    middle = boxes.rows < 250
    room = 500 - boxes.rows[middle] + 1
    top = (boxes.top[middle] + 0.5) / room
    assert top.mean() == pytest.approx(0.5, abs=sampling(0.29, middle.sum()))


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [(10, 1000, 10, 13), (1000, 10, 13, 10)],
    ids=["wide", "high"],
)
def test_hopeless_shapes_fall_back_to_the_centre(
    height: int, width: int, rows: int, columns: int
) -> None:
    boxes = resized_crop_boxes(
        height,
        width,
        50,
        np.random.default_rng(0),
        scale=(0.9, 1.0),
    )
    assert set(boxes.rows) == {rows}
    assert set(boxes.columns) == {columns}
    assert set(boxes.top) == {(height - rows) // 2}
    assert set(boxes.left) == {(width - columns) // 2}


def test_zoom_crops_reach_every_corner() -> None:
    boxes = zoom_crop_boxes(
        40,
        60,
        5000,
        np.random.default_rng(0),
        size=32,
        zoom=1.25,
    )
    assert (boxes.height, boxes.width) == (40, 60)
    # 40 - 32 and 60 - 32 pixels are left over
    assert boxes.top.min() == 0
    assert boxes.top.max() == 8
    assert boxes.left.min() == 0
    assert boxes.left.max() == 28


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
    crops = crop_image(Image.fromarray(image), boxes, 24).astype(int)
    expected = np.moveaxis(crops, -1, 1)

    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    exact = crop_tensors(pixels, [boxes], 24, eight_bit=True)[0]
    assert np.array_equal(exact.numpy(), expected)
    smooth = crop_tensors(pixels, [boxes], 24)[0]
    assert np.abs(smooth.numpy() - expected).max() <= 1.5


def test_crops_let_gradients_through() -> None:
    images = torch.rand(1, 3, 16, 16, requires_grad=True)
    boxes = resized_crop_boxes(16, 16, 4, np.random.default_rng(0))
    crops = crop_tensors(images, [boxes], 8)
    crops.sum().backward()
    # rows of weights sum to one: every output pixel hands out a gradient of one
    pixels_out = 4 * 3 * 8 * 8
    assert images.grad.sum() == pytest.approx(pixels_out, rel=FEATURE)


def test_crops_are_pillows_own_within_one_level() -> None:
    image = Image.fromarray(random_pixels(50, 41, 3))
    boxes = resized_crop_boxes(50, 41, 40, np.random.default_rng(2))
    crops = crop_image(image, boxes, 24).astype(int)
    for view, ours in enumerate(crops):
        left = int(boxes.left[view])
        top = int(boxes.top[view])
        right = left + int(boxes.columns[view])
        bottom = top + int(boxes.rows[view])
        part = image.crop((left, top, right, bottom))
        resized = part.resize((24, 24), Image.Resampling.BILINEAR)
        expected = np.asarray(resized).astype(int)
        if boxes.mirrored[view]:
            expected = expected[:, ::-1]
        # Pillow 13 may take the passes in turn
        assert np.abs(ours - expected).max() <= 1
