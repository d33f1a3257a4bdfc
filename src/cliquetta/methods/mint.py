"""Mint: restore the variance between classes that corruptions take away.

Bao et al., Mint: A Simple Test-Time Adaptation of Vision-Language Models against Common
Corruptions, NeurIPS 2025. Under corruption all features move together; what falls with
accuracy is the variance between classes. With z̃ and z̃_c the running means of all
features and of those predicted as c, each batch gives the gradient of

    Σ_i w_i (|z_i - z̃|² - |z_i - z̃_c(i)|²)                 (total minus within-class variance)

at the loaded LayerNorms of the image tower, where w_i gives every class that the batch
is predicted to contain the same weight. Gradients are averaged over all batches so far,
and one step of Adam from the loaded norms along that average gives the norms of the
batch. Its features under them enter the means m_c of their predicted classes, and it is
predicted by texts that are mixed with those means once K images were seen: normalised
K₀ t_c + K m_c. Norms and optimiser start again with every batch; means and average
gradient stay.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.adam import AdamConfig, AdamState, adam_step
from cliquetta.methods.building.config import NonNegative, Positive
from cliquetta.methods.building.layernorm import LayerNormAdapter
from cliquetta.methods.building.memory import NON_NEGATIVE
from cliquetta.methods.registry import register
from cliquetta.model.clip import l2_normalize
from cliquetta.types import Batch, Prediction


@dataclass(frozen=True)
class MintConfig(AdamConfig):
    """Inter-class variance, with the authors' learning rate for a ViT-B."""

    lr: Positive = 7e-3
    """Learning rate of Adam; the authors take 1.5e-2 for a ViT-L on ImageNet-C."""
    text_weight: NonNegative = 10_000
    """K₀: images at which text and class mean weigh the same."""


def between_class_variance(
    features: Tensor, labels: Tensor, mean: Tensor, class_means: Tensor
) -> Tensor:
    """Mean squared distance of features (B, E) from ``mean`` minus that from their class's mean."""
    counts = labels.bincount(minlength=len(class_means))
    weights = 1 / ((counts > 0).sum() * counts[labels])
    total = (features - mean).square().sum(dim=-1)
    within = (features - class_means[labels]).square().sum(dim=-1)
    return ((total - within) * weights).sum()


@register(
    "mint",
    tuned={"imagenet-c": MintConfig(lr=1.5e-2)},
    setting="CLIP ViT-B/16, CIFAR-100-C",
)
class Mint(LayerNormAdapter):
    """One LayerNorm step per batch up the variance between classes, from running averages."""

    config: MintConfig

    def _setup(self) -> None:
        super()._setup()
        N, E = self.classifier.shape
        for name in ("before", "after"):  # the step
            self.memory.declare(f"{name}.sums", self.classifier.new_zeros(N, E))
            self.memory.declare(
                f"{name}.counts", self.classifier.new_zeros(N), NON_NEGATIVE
            )
        self.memory.declare("gradient", torch.zeros_like(self.tower.start))
        self.memory.declare("batches", self.tower.start.new_zeros(()), NON_NEGATIVE)

    def _predict(self, batch: Batch) -> Prediction:
        memory = self.memory
        with torch.enable_grad():
            start = self.tower.start.detach().requires_grad_()
            features = self.features(start, batch.images)
            labels, means, mean = self._class_means("before", features.detach())
            variance = between_class_variance(features, labels, mean, means)
            (gradient,) = torch.autograd.grad(-variance, start)
        memory["batches"] = memory["batches"] + 1
        memory["gradient"] = torch.lerp(
            memory["gradient"], gradient, 1 / float(memory["batches"])
        )
        fresh = AdamState.begin(self.tower.start)
        norms = adam_step(fresh, memory["gradient"], self.config.adam).values
        with torch.no_grad():
            features = self.features(norms, batch.images)
            _, means, _ = self._class_means("after", features)
            seen = memory["after.counts"].sum()
            text = l2_normalize(
                self.config.text_weight * self.classifier + seen * means
            )
            logits = self.scale * features @ text.T
        return Prediction(logits.float(), {"variance": variance.detach()})

    def _class_means(
        self, name: str, features: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Labels (B,) of features by the texts; running means by class, and of all, with these."""
        labels = (features @ self.classifier.T).argmax(dim=-1)
        member = F.one_hot(labels, len(self.prompts)).to(features.dtype)
        sums = self.memory[f"{name}.sums"] + member.T @ features
        counts = self.memory[f"{name}.counts"] + member.sum(dim=0)
        self.memory[f"{name}.sums"], self.memory[f"{name}.counts"] = sums, counts
        return (
            labels,
            sums / counts.clamp_min(1)[:, None],
            sums.sum(dim=0) / counts.sum(),
        )
