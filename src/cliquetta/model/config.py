"""The shapes of a CLIP model, read from a checkpoint or its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["quick_gelu", "gelu"]


@dataclass(frozen=True)
class VisionConfig:
    """A ViT image tower."""

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    hidden: int
    """Width of the MLP's hidden layer."""
    activation: Activation = "quick_gelu"
    eps: float = 1e-5

    @property
    def patches(self) -> int:
        """Number of patch tokens."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class ResNetConfig:
    """A ModifiedResNet image tower (RN50 ... RN50x64): plain encoding only."""

    image_size: int
    width: int
    layers: tuple[int, int, int, int]
    heads: int


@dataclass(frozen=True)
class TextConfig:
    """A causal text tower."""

    context_length: int
    vocab_size: int
    width: int
    layers: int
    heads: int
    hidden: int
    activation: Activation = "quick_gelu"
    eps: float = 1e-5
    merges: int | None = None
    """Size of a reduced BPE vocabulary; ``None`` is OpenAI's whole one."""


@dataclass(frozen=True)
class CLIPConfig:
    """Both towers and the width of the space in which they meet."""

    embed_dim: int
    vision: VisionConfig | ResNetConfig
    text: TextConfig | None
    """``None`` when only image weights are at hand; text features then come from outside."""
