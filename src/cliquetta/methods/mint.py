"""Mint: restore the variance between classes that corruptions take away.

Bao et al., Mint: A Simple Test-Time Adaptation of Vision-Language Models against Common
Corruptions, NeurIPS 2025. Under corruption all features move together; what falls with accuracy is
the variance between classes. With z̃ and z̃_c the running means of all features and of those
predicted as c, each batch gives the gradient of

    mean over the batch of |z_i - z̃|² - |z_i - z̃_c(i)|²        (total minus within-class variance)

at the loaded LayerNorms of the image tower. Gradients are averaged over all batches so far, and one
step of Adam from the loaded norms along that average gives the norms that the batch is answered
with, by texts pulled to the class means: t̃_c = normalised K₀ t_c + K_c z̃_c. Norms and optimiser
start again with every batch; means and average gradient stay.

The authors' repository names no licence and was not opened. Ours where the descriptions leave it
open: means are those of the loaded norms' features, include the batch and are constants in the
gradient, K_c counts the images predicted as c.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods._shared.adam import AdamConfig, AdamState, adam_step
from cliquetta.methods._shared.config import NonNegative, Positive
from cliquetta.methods._shared.layernorm import LayerNormAdapter
from cliquetta.methods.registry import register
from cliquetta.model.clip import l2_normalize
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class MintConfig(AdamConfig):
    """Inter-class variance, with the authors' learning rate for a ViT-B."""

    lr: Positive = 7e-3
    """Learning rate of Adam; the authors take 1.5e-2 for a ViT-L."""
    text_weight: NonNegative = 10_000
    """K₀: images that a text counts for beside the images of its class."""


def between_class_variance(
    features: Tensor, labels: Tensor, mean: Tensor, class_means: Tensor
) -> Tensor:
    """Mean squared distance of features (B, E) from ``mean`` (E,) minus that from their class's.

    ``class_means`` is (N, E), ``labels`` (B,).
    """
    total = (features - mean).square().sum(dim=-1)
    within = (features - class_means[labels]).square().sum(dim=-1)
    return (total - within).mean()


@register(
    "mint",
    paper="Bao et al., Mint: A Simple Test-Time Adaptation of Vision-Language Models against "
    "Common Corruptions, NeurIPS 2025",
)
class Mint(LayerNormAdapter):
    """One LayerNorm step per batch up the variance between classes, from running averages.

    logits = scale · cos(image under this batch's norms, text pulled to the class's images).
    """

    config: MintConfig

    def _setup(self) -> None:
        super()._setup()
        N, E = self.classifier.shape
        self.memory.declare("sums", self.classifier.new_zeros(N, E))
        self.memory.declare("counts", self.classifier.new_zeros(N))
        self.memory.declare("gradient", torch.zeros_like(self.tower.start))
        self.memory.declare("batches", self.tower.start.new_zeros(()))

    def _predict(self, batch: Batch) -> Prediction:
        memory = self.memory
        with torch.enable_grad():
            start = self.tower.start.detach().requires_grad_()
            features = self.features(start, batch.images)
            labels = (features.detach() @ self.text().T).argmax(dim=-1)
            self._count(features.detach(), labels)
            counts, sums = memory["counts"], memory["sums"]
            means = sums / counts.clamp_min(1)[:, None]
            variance = between_class_variance(features, labels, sums.sum(0) / counts.sum(), means)
            (gradient,) = torch.autograd.grad(-variance, start)
        memory["batches"] = memory["batches"] + 1
        memory["gradient"] = torch.lerp(memory["gradient"], gradient, 1 / float(memory["batches"]))
        fresh = AdamState.begin(self.tower.start)
        norms = adam_step(fresh, memory["gradient"], self.config.adam).values
        with torch.no_grad():
            logits = self.scale * self.features(norms, batch.images) @ self.text().T
        return Prediction(logits.float(), {"variance": variance.detach()})

    def text(self) -> Tensor:
        """t̃ (N, E): texts pulled to the means of the images predicted as their class."""
        return l2_normalize(self.config.text_weight * self.classifier + self.memory["sums"])

    def _count(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch to the sums of its predicted classes."""
        member = F.one_hot(labels, len(self.prompts)).to(features.dtype)
        self.memory["sums"] = self.memory["sums"] + member.T @ features
        self.memory["counts"] = self.memory["counts"] + member.sum(dim=0)
