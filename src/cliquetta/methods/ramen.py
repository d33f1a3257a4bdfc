"""Ramen: a step of its own for every image, from gradients of earlier images of its domain.

Bao et al., Ramen: Robust Test-Time Adaptation of Vision-Language Models with Active
Sample Selection, CVPR 2026. Of every image the feature z and the gradient g of its
entropy by the LayerNorms, both under the loaded norms, are remembered with its
predicted class. Of every class the k images nearest to an image, which are likely of
its domain, give the sign of its step

    Σ_j exp(-H_j) exp(-β |z_i - z_j|) g_j

from the loaded norms, whose every number moves by the learning rate. The image is
predicted under them, and they are dropped. Streams of mixed domains are what it is for:
no image is adapted to the average of them. A batch is remembered before its steps are
made.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.config import (
    Count,
    MethodConfig,
    NonNegative,
    Positive,
    read_presets,
)
from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.building.layernorm import LayerNormAdapter
from cliquetta.methods.building.memory import NON_NEGATIVE, UNIT, Range
from cliquetta.methods.registry import register
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class RamenConfig(MethodConfig):
    """One step per image from a support set of its domain."""

    lr: Positive = 0.01
    """How far every LayerNorm parameter moves, along the sign of the gradient."""
    neighbours: Count = 5  # k: images per class that a step is made of.
    distance_weight: NonNegative = 5.0
    """β: how fast an entry's weight falls with its distance."""
    capacity: Count = 1024
    """Newest images remembered, each with a gradient by all LayerNorms."""


def support_weights(
    distances: Tensor, labels: Tensor, entropies: Tensor, config: RamenConfig
) -> Tensor:
    """Weights (B, M) exp(-H_j - β |z_i - z_j|) of the nearest of every class, zero of others."""
    chosen = torch.zeros_like(distances)
    for label in torch.unique(labels):
        members = (labels == label).nonzero()[:, 0]
        count = min(config.neighbours, len(members))
        nearest = distances[:, members].topk(count, dim=1, largest=False).indices
        chosen.scatter_(1, members[nearest], 1.0)
    return chosen * (-entropies - config.distance_weight * distances).exp()


@register(
    "ramen",
    tuned=read_presets("ramen", RamenConfig),
    setting="CLIP ViT-B/16, CIFAR-100-C",
)
class Ramen(LayerNormAdapter):
    """A LayerNorm step per image, from remembered gradients of similar images of every class."""

    config: RamenConfig

    def _setup(self) -> None:
        super()._setup()
        # only a tower of our own takes LayerNorm parameters per image
        self.model.require_vit()
        M, new = self.config.capacity, self.classifier.new_zeros
        labels = torch.zeros(M, dtype=torch.long, device=self.model.device)
        self.memory.declare("features", new(M, self.classifier.shape[1]), UNIT)
        self.memory.declare("gradients", new(M, self.tower.start.numel()))
        self.memory.declare("entropies", new(M), NON_NEGATIVE)
        self.memory.declare("labels", labels, Range(below=len(self.prompts)))
        self.memory.declare("images", torch.zeros((), dtype=torch.long))

    def _predict(self, batch: Batch) -> Prediction:
        with torch.enable_grad():
            norms = self.tower.start.expand(len(batch), -1).detach().requires_grad_()
            features = self.features(norms, batch.images)
            logits = self.scale * features @ self.classifier.T
            entropies = entropy(logits)
            (gradients,) = torch.autograd.grad(entropies.sum(), norms)  # one per image
        with torch.no_grad():
            features, labels = features.detach(), logits.argmax(dim=-1)
            own = features, gradients, entropies.detach(), labels
            keys, gradients, entropies, labels = self._remember(*own)
            distances = (
                (2 - 2 * features @ keys.T).clamp_min(0).sqrt()
            )  # of unit vectors
            weights = support_weights(distances, labels, entropies, self.config)
            norms = self.tower.start - self.config.lr * (weights @ gradients).sign()
            return Prediction(self.logits(norms, batch.images).float())

    def _remember(self, *arrivals: Tensor) -> list[Tensor]:
        """All that is remembered with the images of a batch; the newest of it stays."""
        memory, M = self.memory, self.config.capacity
        empty = max(0, M - int(memory["images"]))
        memory["images"] = memory["images"] + len(arrivals[0])
        remembered = []
        names = "features", "gradients", "entropies", "labels"
        for name, values in zip(names, arrivals, strict=True):
            remembered.append(torch.cat([memory[name][empty:], values]))
            newest = remembered[-1][-M:]
            memory[name] = F.pad(
                newest, [0, 0] * (values.ndim - 1) + [M - len(newest), 0]
            )
        return remembered
