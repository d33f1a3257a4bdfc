"""The shapes of a CLIP model, read from a checkpoint or its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["quick_gelu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What the towers have in common."""

    width: int
    layers: int
    heads: int
    hidden: int
    """Width of the MLP's hidden layer."""
    activation: Activation = "quick_gelu"
    eps: float = 1e-5


@dataclass(frozen=True)
class VisionConfig(TransformerConfig):
    """A ViT image tower."""

    image_size: int
    patch_size: int
    pooling: Literal["class", "attention"] = "class"
    """``class``: a class token is read (CLIP); ``attention``: a learned query reads the patches
    (SigLIP)."""

    @property
    def patches(self) -> int:
        """Number of patch tokens."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def class_tokens(self) -> int:
        """Tokens before those of the patches: 1 or 0."""
        return 1 if self.pooling == "class" else 0


@dataclass(frozen=True)
class ResNetConfig:
    """A ModifiedResNet image tower (RN50 ... RN50x64): plain encoding only."""

    image_size: int
    width: int
    layers: tuple[int, int, int, int]
    heads: int


@dataclass(frozen=True)
class TextConfig(TransformerConfig):
    """A text tower; by default causal, read at the end token of each text."""

    context_length: int
    vocab_size: int
    merges: int | None = None
    """Size of a reduced BPE vocabulary; ``None`` is OpenAI's whole one."""
    causal: bool = True
    """``False``: every token sees every other one, padding too, and the last is read (SigLIP)."""
    end: int | None = None
    """The end token of a causal tower; ``None`` is the highest id, which is CLIP's."""
    start_tokens: int = 1
    """Special tokens before the first word."""
    projection_bias: bool = False


@dataclass(frozen=True)
class CLIPConfig:
    """Both towers and the width of the space in which they meet."""

    embed_dim: int
    vision: VisionConfig | ResNetConfig
    text: TextConfig | None
    """``None`` when only image weights are at hand; text features then come from outside."""
    sigmoid: bool = False
    """Trained with a sigmoid per pair of image and text: logits have a bias."""
