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
from cliquetta.methods.building.registry import register
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
    """Subtract the variance of features (B, E) within classes from the total.

    Args:
        features: (B, E), of which every predicted class has the same weight.
        labels: Predicted classes (B,).
        mean: z̃ (E,), running mean of all features.
        class_means: z̃_c (N, E), running means by predicted class.

    """
    # w_i: every class that the batch is predicted to contain has the same weight
    counts = labels.bincount(minlength=len(class_means))
    classes = (counts > 0).sum()
    weights = 1 / (classes * counts[labels])

    # |z_i - z̃|² and |z_i - z̃_c(i)|²
    total = (features - mean).square().sum(dim=-1)
    within = (features - class_means[labels]).square().sum(dim=-1)

    # Σ_i w_i (total - within)
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
        memory = self.memory

        # sums and counts by predicted class, of features before and after the step
        counts = self.classifier.new_zeros(len(self.classifier))
        for moment in ("before", "after"):
            memory.declare(f"{moment}.sums", torch.zeros_like(self.classifier))
            memory.declare(f"{moment}.counts", counts, NON_NEGATIVE)

        # the average gradient, and over how many batches
        norms = self.tower.start
        memory.declare("gradient", torch.zeros_like(norms))
        memory.declare("batches", norms.new_zeros(()), NON_NEGATIVE)

    def _predict(self, batch: Batch) -> Prediction:
        memory = self.memory

        # the gradient of a batch at the loaded norms
        with torch.enable_grad():
            norms = self.tower.start.detach().requires_grad_()
            features = self.features(norms, batch.images)
            labels, class_means, mean = self._class_means("before", features.detach())
            variance = between_class_variance(
                features, labels, mean=mean, class_means=class_means
            )
            (gradient,) = torch.autograd.grad(-variance, norms)

        # averaged over all batches so far
        memory["batches"] = memory["batches"] + 1
        share = 1 / float(memory["batches"])
        average = torch.lerp(memory["gradient"], gradient, share)
        memory["gradient"] = average

        # one step of Adam along it, from the loaded norms
        fresh = AdamState.begin(self.tower.start)
        stepped = adam_step(fresh, average, self.config.adam)
        with torch.no_grad():
            features = self.features(stepped.values, batch.images)

            # normalised K₀ t_c + K m_c, with K the number of images so far
            _, class_means, _ = self._class_means("after", features)
            count = memory["after.counts"].sum()
            text = self.config.text_weight * self.classifier + count * class_means
            logits = self.scale * features @ l2_normalize(text).T
        return Prediction(logits.float(), {"variance": variance.detach()})

    def _class_means(
        self, moment: str, features: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Count features (B, E) for the classes that the texts predict.

        Args:
            moment: Whether they are from ``before`` or ``after`` the step.
            features: (B, E).

        Returns:
            Labels (B,); running means by class (N, E) and of all (E,) after them.

        """
        labels = (features @ self.classifier.T).argmax(dim=-1)

        # which image is of which class, (B, N)
        member = F.one_hot(labels, len(self.prompts)).to(features.dtype)

        # sums and counts by class, over all batches
        sums = self.memory[f"{moment}.sums"] + member.T @ features
        counts = self.memory[f"{moment}.counts"] + member.sum(dim=0)

        # with this batch from now on
        self.memory[f"{moment}.sums"] = sums
        self.memory[f"{moment}.counts"] = counts

        # a class that was never predicted has a mean of zero
        class_means = sums / counts.clamp_min(1)[:, None]
        mean = sums.sum(dim=0) / counts.sum()
        return labels, class_means, mean
