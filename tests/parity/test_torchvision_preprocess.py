"""Preprocessing against torchvision's transforms and open_clip's, bit by bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from open_clip.transform import image_transform
from PIL import Image
from torchvision import transforms

from cliquetta.model.preprocess import OPENAI_MEAN, OPENAI_STD, Preprocess

pytestmark = pytest.mark.parity


def pictures(count: int) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        height, width = rng.integers(1, 500, 2)
        if max(height, width) <= 32 * min(height, width):
            yield Image.fromarray(
                rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            )


@pytest.mark.parametrize("size", [32, 224])
def test_bit_equal_to_torchvision_and_open_clip(size: int) -> None:
    resize = transforms.Resize(size, interpolation=transforms.InterpolationMode.BICUBIC)
    normalize = transforms.Normalize(OPENAI_MEAN, OPENAI_STD)
    steps = [resize, transforms.CenterCrop(size), transforms.ToTensor(), normalize]
    torchvision = transforms.Compose(steps)
    open_clip = image_transform(size, is_train=False, mean=OPENAI_MEAN, std=OPENAI_STD)
    ours = Preprocess.openai(size)
    compared = 0
    for image in pictures(200):
        pixels = ours(image)
        assert torch.equal(pixels, torchvision(image)), image.size
        assert torch.equal(pixels, open_clip(image)), image.size
        compared += 1

    assert compared > 150
