"""The tiny CLIP, its classes and its images; a test that changes them builds its own."""

from typing import Any

import torch
from torch import Tensor

from cliquetta.data.views import attach_views
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, ViewSpec
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip, make_tiny_images

TINY = build_tiny_clip()
TINY_PROMPTS = ClassPrompts(TINY_NAMES, ("a photo of a {}.", "a sketch of a {}."))
TINY_IMAGES = make_tiny_images()


def with_views(images: int, spec: ViewSpec) -> Any:
    """Make a batch of the first images with views of each."""
    return attach_views(
        Batch(TINY_IMAGES[:images], tuple("abcdefghij")[:images]), spec, seed=0
    )


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw normal numbers of a shape in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
