"""An image tower and a text matrix as one function of pixels: what can leave this package."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from cliquetta.model.clip import CLIP, l2_normalize
from cliquetta.model.vision import TokenPrompts

Head = Callable[[Tensor, Tensor], Tensor]
"""Unit image features (B, E) and text logits (B, N) to logits (B, N)."""


class FrozenModel(nn.Module):
    """Preprocessed pixels (B, 3, S, S) to logits (B, N), float32; every image by itself.

    ``text`` (N, E) are unit class features. ``visual`` replaces the model's image tower, ``scale``
    its scale, ``head`` changes the text logits, where a method does so. Weights are shared with
    the model.
    """

    text: Tensor

    def __init__(
        self,
        model: CLIP,
        text: Tensor,
        *,
        visual: nn.Module | None = None,
        scale: float | None = None,
        head: Head | None = None,
    ) -> None:
        super().__init__()
        self.visual = model.visual if visual is None else visual
        self.register_buffer("text", text.detach())
        self.scale, self.bias = model.scale if scale is None else scale, model.bias
        self.head = head
        self.requires_grad_(False)
        self.eval()

    def text_logits(self, features: Tensor) -> Tensor:
        """Scaled cosines (B, N) of unit image features (B, E) with the class texts."""
        return F.linear(self.scale * features, self.text)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits (B, N)."""
        features = l2_normalize(self.visual(pixels))
        logits = self.text_logits(features)
        return (logits if self.head is None else self.head(features, logits)) + self.bias


class PromptedTower(nn.Module):
    """A ViT image tower with fixed prompt tokens built in."""

    def __init__(self, tower: nn.Module, tokens: TokenPrompts) -> None:
        super().__init__()
        self.tower = tower
        self.position = tokens.position
        self.layers = nn.ParameterList(
            nn.Parameter(layer.detach(), requires_grad=False) for layer in tokens.layers
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Features (B, E), not normalised."""
        tokens = TokenPrompts(tuple(self.layers), self.position)
        features: Tensor = self.tower(pixels, tokens=tokens)
        return features
