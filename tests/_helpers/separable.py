"""Labelled images of two classes that differ plainly, though not to the tiny CLIP's text tower."""

import torch
from torch import Tensor

from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.support_set import FewShot
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.tiny import TINY_NAMES

TWO = ClassPrompts(TINY_NAMES[:2])
FULL_IMAGE = (1.0, 1.0)
"""The crop scale that crops nothing."""


def make_images(per_class: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32), a smooth pattern for each class plus noise, and their labels.

    They look the same in the mirror, so that without crops augmentation is idle.
    """
    patterns = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    labels = torch.arange(2).repeat_interleave(per_class)
    noise = torch.randn(
        len(labels), 3, 4, 4, generator=torch.Generator().manual_seed(seed)
    )
    coarse = patterns[labels] + 0.4 * noise
    images = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear")
    return (images + images.flip(-1)) / 2, labels


def make_examples(per_class: int = 8, *, seed: int = 1) -> FewShot:
    """Few-shot examples."""
    return FewShot(*make_images(per_class, seed=seed))


def accuracy(adapter: Adapter) -> float:
    """On images that no fit has seen."""
    images, labels = make_images(50, seed=2)
    return float(
        (adapter.predict(Batch(images)).logits.argmax(-1) == labels).float().mean()
    )
