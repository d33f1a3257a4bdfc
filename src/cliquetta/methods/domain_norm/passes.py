"""What runs on the device: plain CLIP with all that the host must know, and the adapted blocks.

Each is a function of tensors that never waits for the device, so that a GPU can record it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods._shared.layernorm import LateBlocks, LayerNormTower
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import (
    GROUP,
    DomainKeys,
    absorb,
    batch_figures,
    signature,
)
from cliquetta.methods.domain_norm.frequencies import target_marginal
from cliquetta.methods.domain_norm.learning import arrange, certain_weights, domain_loss
from cliquetta.methods.domain_norm.statistics import Counts, Recent, count_batch
from cliquetta.model.clip import l2_normalize
from cliquetta.model.vision import VisionTower


@dataclass(frozen=True)
class Encoded:
    """Plain CLIP's view of some images."""

    hidden: Tensor
    """States (b, T, D) at the input of the first adapted block."""
    signatures: Tensor
    features: Tensor
    zero_shot: Tensor
    """Probabilities (b, N)."""
    order: Tensor
    """Rows (b,) as :func:`arrange` orders them by confidence."""

    def take(self, rows: Tensor) -> Encoded:
        """Some of the images."""
        hidden, signatures, features, zero_shot = (
            value.index_select(0, rows)
            for value in (self.hidden, self.signatures, self.features, self.zero_shot)
        )
        return Encoded(hidden, signatures, features, zero_shot, arrange(zero_shot.amax(dim=1)))


class Passes:
    """The passes over a tower with fixed text."""

    def __init__(
        self, tower: VisionTower, classifier: Tensor, scale: float, config: DomainNormConfig
    ) -> None:
        self.tower, self.classifier, self.scale, self.config = tower, classifier, scale, config
        layers = len(tower.blocks)
        self.start = min(max(1, int(layers * config.shared_depth)), layers - 1)
        """The first adapted block."""
        self.late = LayerNormTower(LateBlocks(tower, self.start), precise=False)

    def plain(self, images: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """The fields of :class:`Encoded`, of a key, of counts and of :class:`Counted`.

        ``state`` are the keys of all domains, and key, counts and recent answers of the one in use.
        """
        tower, config = self.tower, self.config
        keys, key = DomainKeys(*state[:3]), DomainKeys(*state[3:6])
        counts, recent = Counts(*state[6:-3]), Recent(*state[-3:])
        hidden = tower.embed(images)
        early = tower.run(hidden, 0, 1)
        shared = hidden if self.start == 0 else tower.run(early, 1, self.start)
        features = l2_normalize(tower.pool(tower.run(shared, self.start)))
        signatures = signature(early, tower.config.class_tokens).to(keys.mean.dtype)
        zero_shot = self.probabilities(features)
        after = count_batch(counts, recent, zero_shot, config)
        figures = [features.isfinite().all().to(zero_shot)[None], after.figures]
        if config.domains > 1 and len(images) >= GROUP:
            figures.append(batch_figures(signatures, keys))
        encoded = shared, signatures, features, zero_shot, arrange(zero_shot.amax(dim=1))
        statistics = after.marginal, after.weights, after.prior, after.belief, torch.cat(figures)
        return *encoded, *absorb(signatures, key), *after.counts, *statistics

    def adapted(self, hidden: Tensor, norms: Tensor) -> tuple[Tensor]:
        """Features (b, E) under LayerNorms of a domain."""
        return (l2_normalize(self.late(norms, hidden)),)

    def learning(
        self,
        hidden: Tensor,
        norms: Tensor,
        plain: Tensor,
        marginal: Tensor,
        prior: Tensor,
        belief: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Features (b, E) under LayerNorms, and the gradient of the loss with respect to them."""
        config, least = self.config, self.config.confident_fraction
        certain = certain_weights(len(hidden), least + (1 - least) * belief.double())
        target = target_marginal(self.probabilities(plain).mean(dim=0), marginal, prior)
        with torch.enable_grad():
            leaf = norms.detach().requires_grad_()
            features = l2_normalize(self.late(leaf, hidden))
            logits = self.scale * features @ self.classifier.T
            loss = domain_loss(logits, target, certain.to(target), config.diversity)
        return features.detach(), torch.autograd.grad(loss, leaf)[0]

    def probabilities(self, features: Tensor) -> Tensor:
        """Of every class (b, N)."""
        return (self.scale * features @ self.classifier.T).softmax(dim=-1)
