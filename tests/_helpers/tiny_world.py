"""The tiny CLIP, its classes and its images; a test that changes them builds its own."""

import torch
from torch import Tensor

from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip, make_tiny_images

TINY = build_tiny_clip()
TINY_PROMPTS = ClassPrompts(TINY_NAMES, ("a photo of a {}.", "a sketch of a {}."))
TINY_IMAGES = make_tiny_images()


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw normal numbers of a shape in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
