"""Unit features whose classes lie beside their texts: what feature-level methods are for."""

import torch
import torch.nn.functional as F
from torch import Tensor


def make_clusters(
    images: int,
    classes: int = 5,
    width: int = 24,
    *,
    spread: float = 0.6,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Features (images, width) in a random order, their labels, and text features.

    Each class has a text direction and a centre some way off it, around which its
    images lie.
    """
    generator = torch.Generator().manual_seed(seed)

    def directions(count: int) -> Tensor:
        drawn = torch.randn(count, width, generator=generator)
        return F.normalize(drawn, dim=-1)

    text = directions(classes)
    offset = directions(classes)
    labels = torch.randint(classes, (images,), generator=generator)
    noise = directions(images)

    # An image lies around its class's centre, which is some way off the text.
    features = 0.5 * text[labels] + 0.8 * offset[labels] + spread * noise
    return F.normalize(features, dim=-1), labels, text


def make_views(
    features: Tensor, views: int, *, noise: float = 0.7, seed: int = 1
) -> Tensor:
    """Unit features (B, V, E): the plain ones first, then noisy ones."""
    generator = torch.Generator().manual_seed(seed)
    B, E = features.shape
    jitter = F.normalize(torch.randn(B, views, E, generator=generator), dim=-1)
    jitter[:, 0] = 0
    return F.normalize(features[:, None] + noise * jitter, dim=-1)
