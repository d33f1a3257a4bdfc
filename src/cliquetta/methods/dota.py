"""DOTA: estimate the distribution of each class from the stream instead of caching images.

Han et al., DOTA: Distributional Test-Time Adaptation of Vision-Language Models, NeurIPS 2025. Every
image counts for class k by its zero-shot probability ŷ_k in running estimates of the class's mean
and of a covariance Σ, from which Gaussian discriminant analysis gives a second answer:

    μ_k ← (c_k μ_k + Σ_i ŷ_ik f_i) / (c_k + Σ_i ŷ_ik),    c_k ← c_k + Σ_i ŷ_ik
    Λ = [(1 - ε) Σ + ε I]⁻¹,    g_k(f) = -½ (f - μ_k)ᵀ Λ (f - μ_k)
    logits = scale f·t_k + λ g_k(f),    λ = min(ρ · images seen, η)

Means start at the texts, Σ at σ²I. A batch first updates the estimates, then is answered; the
paper's batches hold one image. The authors choose ε, σ², ρ, η on validation data per benchmark;
the defaults are those of the TTABC comparison. Their repository names no licence and was not
opened. Ours: each class starts with the weight of one image; the paper averages the classes' own
covariances, N·E² numbers, ours pools them with weights c_k and keeps E².
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods._shared.config import Fraction, MethodConfig, NonNegative, Positive
from cliquetta.methods._shared.feature_level import FixedText
from cliquetta.methods._shared.mixtures import linear_discriminant
from cliquetta.methods.base import BatchDependence
from cliquetta.methods.registry import register
from cliquetta.types import Prediction


@dataclass(frozen=True)
class DOTAConfig(MethodConfig):
    """Online Gaussian discriminant analysis."""

    initial_variance: Positive = 2e-3
    """σ²: variance of every dimension before the first image."""
    shrinkage: Fraction = 1e-4
    """ε: share of the identity in the covariance that is inverted."""
    weight_per_image: NonNegative = 0.02
    """ρ: how much the weight of the Gaussian answer grows with each image."""
    largest_weight: NonNegative = 0.3
    """η: where that weight stops growing; 0 is zero-shot CLIP."""


def update_means(
    means: Tensor, counts: Tensor, features: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Running means (N, E) and counts (N,) after features (B, E) of weights (B, N)."""
    total = counts + weights.sum(dim=0)
    return (counts[:, None] * means + weights.T @ features) / total[:, None], total


def scatter_around(features: Tensor, weights: Tensor, means: Tensor) -> Tensor:
    """Σ_ik w_ik (f_i - μ_k)(f_i - μ_k)ᵀ, (E, E), for weights (B, N) whose rows sum to one."""
    mixed = weights @ means  # Σ_k w_ik μ_k
    cross = features.T @ mixed
    spread = (means * weights.sum(dim=0)[:, None]).T @ means
    return features.T @ features - cross - cross.T + spread


@register(
    "dota",
    paper="Han et al., DOTA: Distributional Test-Time Adaptation of Vision-Language Models, "
    "NeurIPS 2025",
)
class DOTA(FixedText):
    """Running Gaussian estimates of all classes answer beside the text; no training.

    CLIP's logits plus the growing weight of a Gaussian discriminant.
    """

    batch_dependence = BatchDependence.JOINT
    config: DOTAConfig

    def _setup(self) -> None:
        super()._setup()
        N, E = self.classifier.shape
        eye = torch.eye(E, dtype=self.classifier.dtype, device=self.classifier.device)
        self.memory.declare("means", self.classifier)
        self.memory.declare("counts", self.classifier.new_ones(N))
        self.memory.declare("scatter", N * self.config.initial_variance * eye)
        self.memory.declare("images", torch.zeros((), dtype=torch.long, device=self.model.device))

    def _predict_features(self, features: Tensor) -> Prediction:
        features, memory, config = features[:, 0], self.memory, self.config
        logits = self.scale * features @ self.classifier.T
        weights = logits.softmax(dim=-1)
        means, counts = update_means(memory["means"], memory["counts"], features, weights)
        memory["scatter"] = memory["scatter"] + scatter_around(features, weights, memory["means"])
        memory["means"], memory["counts"] = means, counts
        memory["images"] = memory["images"] + len(features)

        eye = torch.eye(features.shape[1], dtype=features.dtype, device=features.device)
        covariance = memory["scatter"] / counts.sum()
        covariance = (1 - config.shrinkage) * covariance + config.shrinkage * eye
        weight = (config.weight_per_image * memory["images"]).clamp(max=config.largest_weight)
        gaussian = linear_discriminant(features, means, covariance)
        return Prediction((logits + weight * gaussian).float())
