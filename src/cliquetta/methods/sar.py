"""SAR: entropy minimisation on reliable images, towards flat minima, with a way back.

Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023. Of every batch the
images of entropy below 0.4 ln N give a gradient g; at the norms moved by ρ g/|g| to where the loss
is worst nearby, those that are still below give the gradient of the step. The norms of the last
quarter of the blocks and the final one are left out. If the moving average of the second loss falls
below 0.2, the model has collapsed: norms and momentum start again. The answer is that of the first
forward pass.

As in the official code (BSD-3), with its SGD of momentum 0.9 and its 1e-3 for a ViT-B at batches of
64. There the threshold of collapse is the same for any number of classes: with ten, sure answers
alone bring it about. Ours: a batch without reliable images changes nothing, momentum included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods._shared.config import Decay, MethodConfig, NonNegative, Positive
from cliquetta.methods._shared.entropy import entropy
from cliquetta.methods._shared.layernorm import LayerNormAdapter
from cliquetta.methods.registry import register
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class SARConfig(MethodConfig):
    """Sharpness-aware and reliable entropy minimisation."""

    lr: Positive = 1e-3
    """Learning rate of SGD."""
    momentum: Decay = 0.9
    """Momentum of SGD."""
    entropy_threshold: NonNegative = 0.4
    """E₀ as a multiple of ln N: images of higher entropy do not teach."""
    radius: Positive = 0.05
    """ρ: how far the norms are moved to the worst point nearby."""
    reset_threshold: NonNegative = 0.2
    """e_m: average second loss, in nats, below which everything learned is dropped."""
    reset_decay: Decay = 0.9
    """Decay of that average."""


@register(
    "sar",
    paper="Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023",
)
class SAR(LayerNormAdapter):
    """Sharpness-aware entropy steps on LayerNorms from reliable images, reset on collapse.

    logits = scale · cos(image under the norms learned so far, text); then one step.
    """

    class_free = frozenset({"norms", "velocity"})
    scaled_cosines = True
    config: SARConfig

    def _setup(self) -> None:
        super()._setup()
        self.mask = self.tower.early()
        self.threshold = self.config.entropy_threshold * math.log(len(self.prompts))
        self.memory.declare("norms", self.tower.start)
        self.memory.declare("velocity", torch.zeros_like(self.tower.start))
        self.memory.declare("average", self.tower.start.new_full((), torch.inf))

    def _predict(self, batch: Batch) -> Prediction:
        norms = self.memory["norms"]
        with torch.enable_grad():
            values = norms.detach().requires_grad_()
            logits = self.logits(values, batch.images)
            entropies = entropy(logits)
            reliable = entropies.detach() < self.threshold
            if reliable.any():
                (gradient,) = torch.autograd.grad(entropies[reliable].mean(), values)
                self._step(batch.images[reliable], gradient * self.mask)
        return Prediction(logits.detach().float(), {"reliable": reliable})

    def _step(self, images: Tensor, gradient: Tensor) -> None:
        """Learn from reliable images whose ``gradient`` points to the worst place nearby."""
        config, memory = self.config, self.memory
        climb = config.radius / (gradient.norm() + 1e-12) * gradient
        values = (memory["norms"] + climb).detach().requires_grad_()
        entropies = entropy(self.logits(values, images))
        still = entropies.detach() < self.threshold
        if not still.any():
            return
        loss = entropies[still].mean()
        (gradient,) = torch.autograd.grad(loss, values)
        velocity = config.momentum * memory["velocity"] + gradient * self.mask
        memory["norms"] = memory["norms"] - config.lr * velocity
        memory["velocity"] = velocity
        before = memory["average"]
        smoothed = config.reset_decay * before + (1 - config.reset_decay) * loss.detach()
        memory["average"] = torch.where(before.isfinite(), smoothed, loss.detach())
        if memory["average"] < config.reset_threshold:
            memory.reset()
