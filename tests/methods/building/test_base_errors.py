"""A batch with images that cannot be read, and arrays in OpenCV's order of channels."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from cliquetta.data.images import ImageError
from cliquetta.errors import UserError
from cliquetta.methods.building.registry import create_method
from tests._helpers.tiny_world import TINY
from tests._helpers.trees import noise, random_pixels

Pixels = npt.NDArray[np.uint8]
NAMES = ["airplane", "cat", "frog"]


@pytest.fixture
def mixed(tmp_path: Path) -> list[Path]:
    """Five files, the second and the last of which cannot be read."""
    return noise(tmp_path, [f"{number}.png" for number in range(5)], damaged=[1, 4])


@pytest.mark.parametrize("name", ["tda", "tent", "zero", "zero_shot"])
def test_broken_images_have_rows_and_teach_nothing(
    name: str, mixed: list[Path]
) -> None:
    """The other images are predicted as if they had come alone, twice in a row."""
    method = create_method(name, TINY, NAMES)
    method.enable_rejection(0.5)
    alone = create_method(name, TINY, NAMES)
    alone.enable_rejection(0.5)
    readable = [0, 2, 3]
    broken = [1, 4]

    for _ in range(2):
        prediction = method.predict(mixed, errors="row")
        expected = alone.predict([mixed[row] for row in readable])

        logits = prediction.logits
        torch.testing.assert_close(logits[readable], expected.logits, rtol=0, atol=0)
        assert logits[broken].isnan().all()

        rejected = prediction.rejection.rejected
        assert rejected[readable].equal(expected.rejection.rejected)
        assert not rejected[broken].any()

        assert list(prediction.errors) == broken
        assert "not an image" in prediction.errors[1]
        first, second, third = expected.labels
        assert prediction.labels == [first, None, second, third, None]


@pytest.fixture
def pixels() -> Pixels:
    """Two pictures of random pixels (2, 40, 48, 3), red first."""
    return random_pixels(2, 40, 48, 3)


def test_a_batch_in_which_nothing_can_be_read_is_all_errors(mixed: list[Path]) -> None:
    method = create_method("tda", TINY, NAMES)
    prediction = method.predict([mixed[1], "nowhere.jpg", b""], errors="row")

    assert prediction.labels == [None, None, None]
    assert prediction.logits.shape == (3, 3)
    assert list(prediction.errors) == [0, 1, 2]


def test_errors_are_raised_unless_rows_are_asked_for(mixed: list[Path]) -> None:
    method = create_method("zero_shot", TINY, NAMES)
    with pytest.raises(ImageError, match=r"1\.png"):
        method.predict(mixed)

    wrong: Any = "ignore"
    with pytest.raises(UserError, match="known are raise, row"):
        method.predict(mixed, errors=wrong)


@pytest.mark.parametrize("form", ["array", "list", "with alpha", "tensor"])
def test_opencvs_channels_are_turned(form: str, pixels: Pixels) -> None:
    blue_first = pixels[..., ::-1]
    images: Any = blue_first
    if form == "list":
        images = list(blue_first)
    if form == "with alpha":
        alpha = np.full((2, 40, 48, 1), 255, np.uint8)
        images = np.concatenate([blue_first, alpha], axis=-1)
    if form == "tensor":
        images = torch.from_numpy(blue_first.copy()).permute(0, 3, 1, 2)

    method = create_method("zero_shot", TINY, NAMES)
    pictures = [Image.fromarray(one) for one in pixels]
    expected = method.predict(pictures).logits
    actual = method.predict(images, channel_order="bgr").logits

    assert torch.equal(actual, expected)


def test_channels_are_red_first_unless_said_otherwise(pixels: Pixels) -> None:
    method = create_method("zero_shot", TINY, NAMES)
    expected = method.predict(pixels).logits
    turned = method.predict(pixels[..., ::-1]).logits

    assert not torch.equal(turned, expected)


def test_pil_images_know_their_order(pixels: Pixels) -> None:
    method = create_method("zero_shot", TINY, NAMES)
    pictures = [Image.fromarray(one) for one in pixels]
    expected = method.predict(pictures).logits
    actual = method.predict(pictures, channel_order="bgr").logits

    assert torch.equal(actual, expected)


def test_preprocessed_pixels_have_no_other_order(pixels: Pixels) -> None:
    method = create_method("zero_shot", TINY, NAMES)
    pictures = [Image.fromarray(one) for one in pixels]
    ready = torch.stack([TINY.preprocess(picture) for picture in pictures])

    with pytest.raises(UserError, match="leave out channel_order"):
        method.predict(ready, channel_order="bgr")
