"""SAR: entropy minimisation on reliable images, towards flat minima, with a way back.

Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023. Of
every batch the images of entropy below 0.4 ln N give a gradient g; at the norms moved
by ρ g/|g| to where the loss is worst nearby, those that are still below give the
gradient of the step. The norms of the last quarter of the blocks and the final one are
left out. If the moving average of the second loss falls below 0.2, the model has
collapsed: the norms start again. The first forward pass predicts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.building.config import Decay, NonNegative, Positive
from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.building.layernorm import MomentumAdapter, MomentumConfig
from cliquetta.methods.building.memory import NON_NEGATIVE
from cliquetta.methods.registry import register
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class SARConfig(MomentumConfig):
    """Sharpness-aware and reliable entropy minimisation."""

    entropy_threshold: NonNegative = 0.4
    """E₀ as a multiple of ln N: higher entropy does not teach."""
    radius: Positive = 0.05  # ρ: how far the norms are moved to the worst point nearby.
    reset_threshold: NonNegative = 0.2
    """e_m: average second loss, in nats, below which the norms start again."""
    reset_decay: Decay = 0.9  # Decay of that average.


@register("sar", setting="ViT-B/16, ImageNet-C")
class SAR(MomentumAdapter):
    """Sharpness-aware entropy steps on LayerNorms from reliable images, reset on collapse."""

    config: SARConfig

    def _setup(self) -> None:
        super()._setup()
        self.threshold = self.config.entropy_threshold * math.log(len(self.prompts))
        self.memory.declare(
            "average", self.tower.start.new_full((), torch.inf), NON_NEGATIVE
        )

    def _predict(self, batch: Batch) -> Prediction:
        config, memory = self.config, self.memory
        with torch.enable_grad():
            values = memory["norms"].detach().requires_grad_()
            logits = self.logits(values, batch.images)
            entropies = entropy(logits)
            reliable = entropies.detach() < self.threshold
            gradient = torch.zeros_like(values)
            if reliable.any():
                (gradient,) = torch.autograd.grad(entropies[reliable].mean(), values)
                gradient = self._worst_gradient(
                    batch.images[reliable], gradient * self.mask
                )
        self.step(gradient, len(batch))
        if memory["average"] < config.reset_threshold:
            memory["norms"] = self.tower.start
        return Prediction(logits.detach().float(), {"reliable": reliable})

    def _worst_gradient(self, images: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of reliable images where ``gradient`` leads to; its loss is averaged."""
        config, memory = self.config, self.memory
        climb = config.radius / (gradient.norm() + 1e-12) * gradient
        values = (memory["norms"] + climb).detach().requires_grad_()
        entropies = entropy(self.logits(values, images))
        still = entropies.detach() < self.threshold
        if not still.any():
            return torch.zeros_like(gradient)
        loss = entropies[still].mean()
        before = memory["average"]
        smoothed = (
            config.reset_decay * before + (1 - config.reset_decay) * loss.detach()
        )
        memory["average"] = torch.where(before.isfinite(), smoothed, loss.detach())
        worst: Tensor = torch.autograd.grad(loss, values)[0]
        return worst
