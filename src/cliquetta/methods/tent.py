"""Tent: make the predictions of each batch more certain through the image tower's LayerNorms.

Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021. Of
every batch the mean entropy of the predictions is lowered by one step of Adam on the
gains and biases of all LayerNorms of the image tower, which stays; the prediction is of
the forward pass before it.
"""

from dataclasses import dataclass

import torch

from cliquetta.methods.building.adam import AdamConfig, AdamState, adam_step
from cliquetta.methods.building.config import Positive
from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.building.layernorm import LayerNormAdapter
from cliquetta.methods.building.registry import register
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class TentConfig(AdamConfig):
    """Entropy minimisation on visual LayerNorms, never reset."""

    lr: Positive = 1e-3
    """Learning rate of Adam; norms drift above 1e-3, long streams need less."""


@register("tent", for_batches=True)
class Tent(LayerNormAdapter):
    """One entropy step per batch on the image tower's LayerNorms, kept for the next batch."""

    merge_rules = (("norms", "mean"),)
    scaled_cosines = True
    config: TentConfig

    def _setup(self) -> None:
        super()._setup()
        AdamState.begin(self.tower.start).declare(self.memory, "norms")

    def _predict(self, batch: Batch) -> Prediction:
        state = AdamState.load(self.memory, "norms")
        with torch.enable_grad():
            norms = state.values.detach().requires_grad_()

            # the forward pass before the step is the prediction
            logits = self.logits(norms, batch.images)
            loss = entropy(logits).mean()
            (gradient,) = torch.autograd.grad(loss, norms)

        # one step of Adam, which stays
        stepped = adam_step(state, gradient, self.config.adam)
        stepped.store(self.memory, "norms")
        return Prediction(logits.detach().float(), {"loss": loss.detach()})
