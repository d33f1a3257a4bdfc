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
from cliquetta.methods.building.registry import register
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
    """Weigh the remembered images by which each image of a batch steps.

    Args:
        distances: (B, M).
        labels: Predicted classes (M,) of the remembered images.
        entropies: H (M,) of those.
        config: Settings.

    Returns:
        exp(-H_j - β |z_i - z_j|) (B, M) of the nearest of every class, zero of others.

    """
    # 1 for the images that an image steps by
    chosen = torch.zeros_like(distances)
    for label in torch.unique(labels):
        # the k nearest of this class
        members = (labels == label).nonzero()[:, 0]
        count = min(config.neighbours, len(members))
        nearest = distances[:, members].topk(count, dim=1, largest=False).indices
        chosen.scatter_(1, members[nearest], 1.0)

    # sure images and near ones count more
    weights = (-entropies - config.distance_weight * distances).exp()
    return chosen * weights


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
        capacity = self.config.capacity
        zeros = self.classifier.new_zeros
        declare = self.memory.declare

        # the newest images, the last one at the end; empty rows stand before them
        width = self.classifier.shape[1]
        declare("features", zeros(capacity, width), UNIT)

        # the gradient of each, its entropy and its predicted class
        norms = self.tower.start.numel()
        labels = torch.zeros(capacity, dtype=torch.long, device=self.model.device)
        declare("gradients", zeros(capacity, norms))
        declare("entropies", zeros(capacity), NON_NEGATIVE)
        declare("labels", labels, Range(below=len(self.prompts)))

        # the number of images so far
        declare("images", torch.zeros((), dtype=torch.long))

    def _predict(self, batch: Batch) -> Prediction:
        # gradients of every image by norms of its own, all as loaded
        with torch.enable_grad():
            norms = self.tower.start.expand(len(batch), -1).detach().requires_grad_()
            features = self.features(norms, batch.images)
            logits = self.scale * features @ self.classifier.T
            entropies = entropy(logits)
            (gradients,) = torch.autograd.grad(entropies.sum(), norms)

        with torch.no_grad():
            features = features.detach()
            support = self._remember(
                features=features,
                gradients=gradients,
                entropies=entropies.detach(),
                labels=logits.argmax(dim=-1),
            )

            # |z_i - z_j| of unit vectors
            cosines = features @ support["features"].T
            distances = (2 - 2 * cosines).clamp_min(0).sqrt()
            weights = support_weights(
                distances,
                labels=support["labels"],
                entropies=support["entropies"],
                config=self.config,
            )

            # Σ_j exp(-H_j) exp(-β |z_i - z_j|) g_j, of which only the sign counts
            direction = (weights @ support["gradients"]).sign()  # (B, P)
            norms = self.tower.start - self.config.lr * direction
            return Prediction(self.logits(norms, batch.images).float())

    def _remember(self, **arrivals: Tensor) -> dict[str, Tensor]:
        """Remember the images of a batch, of which the newest stay.

        Returns:
            All that is remembered together with the batch, beyond the capacity.

        """
        memory = self.memory
        capacity = self.config.capacity

        # rows of zeros before the first image
        empty = max(0, capacity - int(memory["images"]))
        memory["images"] = memory["images"] + len(arrivals["labels"])

        support = {}
        for name, values in arrivals.items():
            rows = torch.cat([memory[name], values])
            support[name] = rows[empty:]

            # a copy, so that what is forgotten is freed
            memory[name] = rows[-capacity:].clone()
        return support
