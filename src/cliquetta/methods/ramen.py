"""Ramen: a step of its own for every image, from gradients of earlier images of its domain.

Bao et al., Ramen: Robust Test-Time Adaptation of Vision-Language Models with Active Sample
Selection, CVPR 2026. Of every image the feature z and the gradient g of its entropy by the
LayerNorms, both under the loaded norms, enter a queue of its predicted class. From every queue the
k entries most like the image are taken, which are likely of its domain and equally many per class;
one step along

    Σ_j exp(-H_j) exp(-β |z_i - z_j|) g_j

from the loaded norms gives the norms that the image is answered with. They are then dropped.
Streams of mixed domains are what it is for: no image is adapted to the average of them.

The repository names no licence and was not opened. The descriptions of the paper leave open the
length of the queues, k, β and the optimiser; here 16, 4, 1 and Adam at 1e-3. Ours: a batch goes
through the tower at once, with LayerNorm parameters per image, and gives what one image after the
other gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods._shared.adam import AdamConfig, AdamState, adam_step
from cliquetta.methods._shared.cache import simulate_insertions, store
from cliquetta.methods._shared.config import Count, NonNegative
from cliquetta.methods._shared.entropy import entropy
from cliquetta.methods._shared.layernorm import LayerNormAdapter
from cliquetta.methods.base import BatchDependence
from cliquetta.methods.registry import register
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class RamenConfig(AdamConfig):
    """One step per image from a support set of its domain."""

    capacity: Count = 16
    """K: newest images kept per class."""
    neighbours: Count = 4
    """k: images per class that a step is made of."""
    distance_weight: NonNegative = 1.0
    """β: how fast an entry's weight falls with its distance."""


def per_class(values: Tensor, classes: Tensor, count: int, fill: float) -> Tensor:
    """Values (B, M) of images of ``classes`` (M,) as (B, N, M), ``fill`` where another's."""
    own = classes == torch.arange(count, device=classes.device)[:, None]  # (N, M)
    return torch.where(own, values[:, None], fill)


def nearest_of_each_class(similarity: Tensor, neighbours: int) -> Tensor:
    """Which of (B, N, M) are among the ``neighbours`` largest finite ones of their class."""
    top = similarity.topk(min(neighbours, similarity.shape[2]), dim=-1)
    return torch.zeros_like(similarity, dtype=torch.bool).scatter(
        2, top.indices, top.values.isfinite()
    )


def entry_weights(similarity: Tensor, entropies: Tensor, distance_weight: float) -> Tensor:
    """exp(-H_j) exp(-β |z_i - z_j|) of unit features with these cosines."""
    distance = (2 - 2 * similarity).clamp_min(0).sqrt()
    return (-entropies - distance_weight * distance).exp()


@register(
    "ramen",
    paper="Bao et al., Ramen: Robust Test-Time Adaptation of Vision-Language Models with Active "
    "Sample Selection, CVPR 2026",
)
class Ramen(LayerNormAdapter):
    """A LayerNorm step per image, from cached gradients of similar images of every class.

    logits = scale · cos(image under norms of its own, text).
    """

    batch_dependence = BatchDependence.SEQUENTIAL
    config: RamenConfig

    def _setup(self) -> None:
        super()._setup()
        self.model.require_vit()  # only a tower of our own takes LayerNorm parameters per image
        N, E = self.classifier.shape
        new = self.classifier.new_zeros
        self.memory.declare("age", new(N, self.config.capacity) + torch.inf)
        self.memory.declare("entropies", new(N, self.config.capacity))
        self.memory.declare("features", new(N, self.config.capacity, E))
        self.memory.declare("gradients", new(N, self.config.capacity, self.tower.start.numel()))
        self.memory.declare("images", torch.zeros((), dtype=torch.long, device=self.model.device))

    def _predict(self, batch: Batch) -> Prediction:
        with torch.enable_grad():
            norms = self.tower.start.expand(len(batch), -1).detach().requires_grad_()
            features = self.features(norms, batch.images)
            logits = self.scale * features @ self.classifier.T
            entropies = entropy(logits)
            (gradients,) = torch.autograd.grad(entropies.sum(), norms)  # one per image
        with torch.no_grad():
            direction = self._support(features, logits.argmax(dim=-1), entropies, gradients)
            state = AdamState.begin(norms.detach())
            own = adam_step(state, direction, self.config.adam).values
            return Prediction(self.logits(own, batch.images).float())

    def _support(
        self, features: Tensor, labels: Tensor, entropies: Tensor, gradients: Tensor
    ) -> Tensor:
        """Weighted sums (B, P) of gradients as each image, once queued, finds them."""
        memory, config, N = self.memory, self.config, len(self.prompts)
        arrival = memory["images"] + torch.arange(len(features), device=features.device)
        age = -arrival.to(memory["age"].dtype)  # the newest are kept: lower is newer
        occupancy = simulate_insertions(memory["age"], labels, age)
        cosines = torch.cat([memory["features"].flatten(0, 1), features]) @ features.T
        old = cosines[: -len(features)].T.view(occupancy.old.shape)
        old = old.masked_fill(~occupancy.old, -torch.inf)
        fresh = cosines[-len(features) :].T.masked_fill(~occupancy.new, -torch.inf)
        candidates = torch.cat([old, per_class(fresh, labels, N, -torch.inf)], dim=2)
        chosen = nearest_of_each_class(candidates, config.neighbours)
        chosen_old, chosen_new = chosen[:, :, : config.capacity], chosen[:, :, config.capacity :]
        beta = config.distance_weight
        weights = chosen_old * entry_weights(old.nan_to_num(neginf=0), memory["entropies"], beta)
        own = chosen_new.any(dim=1) * entry_weights(fresh.nan_to_num(neginf=0), entropies, beta)
        direction = weights.flatten(1) @ memory["gradients"].flatten(0, 1) + own @ gradients

        arrivals = {"age": age, "entropies": entropies, "features": features}
        for name, values in {**arrivals, "gradients": gradients}.items():
            memory[name] = store(memory[name], values, occupancy)
        memory["images"] = memory["images"] + len(features)
        return direction
