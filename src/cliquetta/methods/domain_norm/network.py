"""CLIP with fixed text as a function of the LayerNorms of its later blocks (Eq. 1 to 3)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.layernorm import LateBlocks, LayerNormTower
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.model.clip import CLIP, l2_normalize
from cliquetta.prompts.classes import ClassPrompts


class Network:
    """The towers: images to hidden states h, these to features f(h; θ), these to probabilities."""

    def __init__(self, model: CLIP, prompts: ClassPrompts, config: DomainNormConfig) -> None:
        self.tower, self.dtype = model.require_vit(), model.dtype
        self.text, self.scale = model.classifier(prompts), model.scale
        blocks = len(self.tower.blocks)
        self.start = min(max(1, int(blocks * config.shared_depth)), blocks - 1)  # first adapted
        self.late = LayerNormTower(LateBlocks(self.tower, self.start), precise=False)
        self.theta = self.late.start  # θ₀ (P,): gains and biases as loaded

    def features(self, hidden: Tensor, theta: Tensor | None = None) -> Tensor:
        """Compute unit features f(h; θ) (b, E) of hidden states (b, T, D); f(h; θ₀) by default."""
        if theta is None:
            return l2_normalize(self.tower.pool(self.tower.run(hidden, self.start)))
        return l2_normalize(self.late(theta, hidden))

    def logits(self, features: Tensor) -> Tensor:
        """Compute scaled cosines (b, N) of features and class texts, Eq. 1."""
        return self.scale * features @ self.text.T


class Encoded(NamedTuple):
    """Some images, in the order of :func:`arrange`; with θ instead of θ₀, p takes z's place."""

    hidden: Tensor  # h (b, T, D), at the input of the first adapted block
    signatures: Tensor  # s (b, F)
    features: Tensor  # f(h; θ₀) (b, E)
    zero_shot: Tensor  # z (b, N)
    rows: Tensor  # (b,) of each image in its batch

    def take(self, rows: Tensor) -> Encoded:
        """Select some of the images, and arrange these."""
        order = rows[arrange(self.zero_shot.amax(dim=1)[rows])]
        return Encoded(*(value.index_select(0, order) for value in self))

    def split(self, size: int) -> list[Encoded]:
        """Divide the images into stretches of at most ``size``; one of them is this itself."""
        if len(self.rows) <= size:
            return [self]
        return [Encoded(*p) for p in zip(*(torch.split(v, size) for v in self), strict=True)]


def encode(images: Tensor, theta: Tensor | None, network: Network) -> Encoded:
    """Encode images (b, 3, S, S), without ``theta`` by plain CLIP: Eq. 1, 2 and 3."""
    early = network.tower.run(network.tower.embed(images), 0, 1)
    hidden = network.tower.run(early, 1, network.start)
    signatures = signature(early, network.tower.config.class_tokens).to(network.theta.dtype)
    features = network.features(hidden, theta)
    rows = torch.arange(len(images), device=images.device)
    batch = Encoded(hidden, signatures, features, network.logits(features).softmax(dim=1), rows)
    return batch.take(rows)


def signature(early: Tensor, class_tokens: int = 1) -> Tensor:
    """Mean and deviation over patches (b, 2 D) of hidden states (b, T, D) after block 1, Eq. 2."""
    patches = early[:, class_tokens:].float()
    return torch.cat([patches.mean(dim=1), patches.std(dim=1)], dim=1)


def arrange(confidence: Tensor) -> Tensor:
    """Order images by their confidence (b,), so that any stretch is a fair sample, Eq. 3."""
    return confidence.argsort().index_select(0, _permutation(len(confidence), confidence.device))


@cache
def _permutation(count: int, device: torch.device) -> Tensor:
    """Draw a permutation that depends on nothing; it is copied to the device once."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)
