"""Streams that nobody would send in good faith, and clean images after them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import Tensor

from cliquetta.data.catalogue import get_dataset
from cliquetta.methods.base import Adapter
from cliquetta.methods.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from cliquetta.types import Batch

CLEAN, HOSTILE, BATCH = 200, 128, 64
Pixels = npt.NDArray[np.uint8]


@cache
def model() -> CLIP:
    return create_model("micro", device="cpu")


@cache
def clean() -> tuple[Tensor, Tensor]:
    """Images and labels, classes mixed."""
    dataset = get_dataset("bundled")
    chosen = np.random.default_rng(0).permutation(len(dataset))[:CLEAN].tolist()
    images = torch.stack([model().preprocess(dataset.load(i)) for i in chosen])
    return images, torch.tensor([dataset.labels[i] for i in chosen])


def prepared(pictures: list[Pixels]) -> Tensor:
    return torch.stack([model().preprocess(Image.fromarray(one)) for one in pictures])


def noise(count: int) -> Tensor:
    draw = np.random.default_rng(1)
    return prepared([draw.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(count)])


def one_class() -> Tensor:
    images, labels = clean()
    own = images[labels == labels[0]]
    return own.repeat(-(-HOSTILE // len(own)), 1, 1, 1)[:HOSTILE]


def alternating() -> Tensor:
    """Every second image is a negative of a clean one."""
    images = clean()[0][: HOSTILE // 2]
    return torch.stack([images, -images], dim=1).flatten(0, 1)


STREAMS: dict[str, Callable[[], Tensor]] = {
    "black": lambda: prepared([np.zeros((32, 32, 3), np.uint8)] * HOSTILE),
    "constant": lambda: prepared([np.full((32, 32, 3), 200, np.uint8)] * HOSTILE),
    "one class": one_class,
    "noise": lambda: noise(HOSTILE),
    "alternating domains": alternating,
    "duplicates": lambda: clean()[0][:1].repeat(HOSTILE, 1, 1, 1),
    "one pixel": lambda: prepared(
        list(np.random.default_rng(2).integers(0, 256, (HOSTILE, 1, 1, 3), dtype=np.uint8))
    ),
}


def right(adapter: Adapter) -> int:
    images, labels = clean()
    found = [adapter.predict(Batch(part)).logits.argmax(dim=1) for part in images.split(BATCH)]
    return int((torch.cat(found) == labels).sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_clean_images_are_classified_as_by_zero_shot_or_better(name: str) -> None:
    prompts = get_dataset("bundled").prompts
    adapter = create_method("domain_norm", model(), prompts)
    for part in STREAMS[name]().split(BATCH):
        assert adapter.predict(Batch(part)).logits.isfinite().all()
    zero_shot = right(create_method("zero_shot", model(), prompts))
    assert right(adapter) >= zero_shot - CLEAN // 100
