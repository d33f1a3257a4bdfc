"""Shapes of a CLIP model, read from a checkpoint or its config."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cliquetta.errors import UnknownNameError, UserError

Activation = Literal["quick_gelu", "gelu", "gelu_tanh"]

# Sizes beyond these are mistakes: no such model exists, and building one would take
# forever.
_MOST = {"layers": 1000, "vocab_size": 10**7}
_MOST_OTHERWISE = 10**6


def _check(config: Any, name: str, valid: bool, expected: str) -> None:
    """Refuse a field that is not valid."""
    if not valid:
        raise UserError(
            f"a model's config says {name} = {getattr(config, name)!r}, {expected}: correct its "
            "config file, or download it again"
        )


def check_sizes(config: Any, *names: str) -> None:
    """Refuse fields that are not integers from 1 on; files hold anything."""
    for name in names:
        value = getattr(config, name)
        most = _MOST.get(name, _MOST_OTHERWISE)

        # True is an integer for Python.
        is_integer = isinstance(value, int) and not isinstance(value, bool)

        valid = is_integer and 0 < value <= most
        _check(config, name, valid, f"expected an integer from 1 to {most}")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Fields of both kinds of tower."""

    width: int
    layers: int
    heads: int
    hidden: int
    """width of the MLP's hidden layer"""
    activation: Activation = "quick_gelu"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        """Validate fields."""
        check_sizes(self, "width", "layers", "heads", "hidden")

        # Every head is as wide.
        divides = self.width % self.heads == 0
        _check(
            self, "heads", divides, f"which does not divide its width of {self.width}"
        )

        activations = get_args(Activation)
        if self.activation not in activations:
            raise UnknownNameError("activation", str(self.activation), activations)

        is_number = isinstance(self.eps, float | int) and self.eps is not True
        valid = is_number and 0 < self.eps < math.inf
        _check(self, "eps", valid, "expected a number above 0")


@dataclass(frozen=True)
class VisionConfig(TransformerConfig):
    """Shapes of a ViT image tower."""

    image_size: int
    patch_size: int
    pooling: Literal["class", "attention"] = "class"
    """a class token, or a learned query (SigLIP)"""

    def __post_init__(self) -> None:
        """Validate fields."""
        super().__post_init__()
        check_sizes(self, "image_size", "patch_size")
        fits = self.patch_size <= self.image_size
        _check(
            self, "patch_size", fits, f"more than its image_size of {self.image_size}"
        )

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
    """Shapes of a ModifiedResNet image tower (RN50 ... RN50x64): plain encoding only."""

    image_size: int
    width: int
    layers: tuple[int, int, int, int]
    heads: int


@dataclass(frozen=True)
class TextConfig(TransformerConfig):
    """Shapes of a text tower; by default causal, read at the end token of each text."""

    context_length: int
    vocab_size: int
    merges: int | None = None
    """size of a reduced BPE vocabulary; `None` is all of OpenAI's"""
    causal: bool = True
    """else tokens see all others, padding too, and the last is read (SigLIP)"""
    end: int | None = None
    """the end token of a causal tower; `None` is the highest id, CLIP's"""
    start_tokens: int = 1
    """special tokens before the first word"""
    projection_bias: bool = False

    def __post_init__(self) -> None:
        """Validate fields."""
        super().__post_init__()
        check_sizes(self, "context_length", "vocab_size")


@dataclass(frozen=True)
class CLIPConfig:
    """Both towers and the width of the space in which they meet."""

    embed_dim: int
    vision: VisionConfig | ResNetConfig
    text: TextConfig | None
    """`None` without text weights; the user then supplies text features"""
    sigmoid: bool = False
    """trained with a sigmoid per pair of image and text: logits have a bias"""

    def __post_init__(self) -> None:
        """Validate fields."""
        check_sizes(self, "embed_dim")
