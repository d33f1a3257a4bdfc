"""SAR: entropy minimisation on reliable images, towards flat minima, with reset.

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
from cliquetta.methods.building.registry import register
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

        # E₀, by the entropy of a mere guess
        chance = math.log(len(self.prompts))
        self.threshold = self.config.entropy_threshold * chance

        # of the second loss, infinite before the first step
        average = self.tower.start.new_full((), torch.inf)
        self.memory.declare("average", average, NON_NEGATIVE)

    def _predict(self, batch: Batch) -> Prediction:
        memory = self.memory
        with torch.enable_grad():
            norms = memory["norms"].detach().requires_grad_()
            logits = self.logits(norms, batch.images)
            entropies = entropy(logits)
            reliable = entropies.detach() < self.threshold

            # first pass: the gradient leads to where the loss is worst nearby
            gradient = torch.zeros_like(norms)
            if reliable.any():
                loss = entropies[reliable].mean()
                (gradient,) = torch.autograd.grad(loss, norms)
                gradient = self._worst_gradient(
                    batch.images[reliable], gradient * self.mask
                )
        self.step(gradient, len(batch))

        # collapsed: nothing is uncertain any more
        if memory["average"] < self.config.reset_threshold:
            memory["norms"] = self.tower.start
        return Prediction(logits.detach().float(), {"reliable": reliable})

    def _worst_gradient(self, images: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient at the worst point nearby, to which ``gradient`` leads.

        The loss there enters the moving average.
        """
        # second pass, at the norms moved by ρ g / |g|
        climb = self.config.radius / (gradient.norm() + 1e-12) * gradient
        norms = (self.memory["norms"] + climb).detach().requires_grad_()
        entropies = entropy(self.logits(norms, images))

        # images that are still reliable there
        still = entropies.detach() < self.threshold
        if not still.any():
            return torch.zeros_like(gradient)
        loss = entropies[still].mean()

        # the moving average of this loss, which the first one starts
        decay = self.config.reset_decay
        average = self.memory["average"]
        smoothed = decay * average + (1 - decay) * loss.detach()
        self.memory["average"] = torch.where(
            average.isfinite(), smoothed, loss.detach()
        )
        worst: Tensor = torch.autograd.grad(loss, norms)[0]
        return worst
