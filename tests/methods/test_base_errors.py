"""A batch with images that cannot be read, and arrays in OpenCV's order of channels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cliquetta.data.images import ImageError
from cliquetta.errors import UserError
from cliquetta.methods.registry import create_method
from tests._helpers.tiny_world import TINY
from tests._helpers.trees import noise, random_pixels

NAMES = ["airplane", "cat", "frog"]


@pytest.fixture
def mixed(tmp_path: Path) -> list[Path]:
    """Five files, the second and the last of which cannot be read."""
    return noise(tmp_path, [f"{number}.png" for number in range(5)], damaged=[1, 4])


@pytest.mark.parametrize("name", ["tda", "tent", "zero", "zero_shot"])
def test_broken_images_have_rows_and_teach_nothing(
    name: str, mixed: list[Path]
) -> None:
    method = create_method(name, TINY, NAMES)
    method.enable_rejection(0.5)
    alone = create_method(name, TINY, NAMES)
    alone.enable_rejection(0.5)
    for _ in range(2):
        prediction = method.predict(mixed, errors="row")
        expected = alone.predict([mixed[0], mixed[2], mixed[3]])
        torch.testing.assert_close(
            prediction.logits[[0, 2, 3]], expected.logits, rtol=0, atol=0
        )
        assert prediction.rejection.rejected[[0, 2, 3]].equal(
            expected.rejection.rejected
        )
        assert not prediction.rejection.rejected[[1, 4]].any()
        assert prediction.logits[[1, 4]].isnan().all()
        assert prediction.errors.keys() == {1, 4}
        assert "not an image" in prediction.errors[1]
        labels = expected.labels
        assert prediction.labels == [labels[0], None, *labels[1:], None]


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


def test_opencvs_channels_are_turned() -> None:
    """Arrays and tensors, with and without alpha; PIL images know their order."""
    pixels = random_pixels(2, 40, 48, 3)
    method = create_method("zero_shot", TINY, NAMES)
    expected = method.predict([Image.fromarray(one) for one in pixels]).logits
    alpha = np.full((2, 40, 48, 1), 255, np.uint8)
    given = {
        "array": pixels[..., ::-1],
        "list": list(pixels[..., ::-1]),
        "alpha": np.concatenate([pixels[..., ::-1], alpha], axis=-1),
        "tensor": torch.from_numpy(pixels).permute(0, 3, 1, 2).flip(1),
    }
    for name, images in given.items():
        actual = method.predict(images, channel_order="bgr").logits
        assert torch.equal(actual, expected), name
    assert not torch.equal(method.predict(given["array"]).logits, expected)
    pictures = [Image.fromarray(one) for one in pixels]
    assert torch.equal(method.predict(pictures, channel_order="bgr").logits, expected)
    ready = torch.stack([TINY.preprocess(picture) for picture in pictures])
    with pytest.raises(UserError, match="leave out channel_order"):
        method.predict(ready, channel_order="bgr")
