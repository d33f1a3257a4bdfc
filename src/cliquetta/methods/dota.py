"""DOTA: estimate the distribution of each class from the stream instead of caching images.

Han et al., DOTA: Distributional Test-Time Adaptation of Vision-Language Models, NeurIPS
2025. Every image counts for class k by its zero-shot probability ŷ_k in running
estimates of the class's mean and covariance, from which Gaussian discriminant analysis
gives a second prediction:

    μ_k ← (c_k μ_k + ŷ_k f) / (c_k + ŷ_k),    c_k ← c_k + ŷ_k
    Σ_k ← (c_k Σ_k + ŷ_k (f - μ_k)(f - μ_k)ᵀ) / (c_k + ŷ_k)          with the mean before f
    Λ = [(1 - ε) mean_k Σ_k + ε I]⁻¹,    g_k(f) = fᵀΛμ_k - ½ μ_kᵀΛμ_k
    logits = scale f·t_k + λ g_k(f),    λ = min(ρ · mean_k c_k, η)

Images come one by one, and each is predicted before it is learned from. Every class
starts with the weight of one image, a mean of 0.001 in all dimensions and the
covariance σ²I.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.base import BatchDependence
from cliquetta.methods.building.config import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    read_presets,
)
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.memory import NON_NEGATIVE, SHORT, VARIANCE
from cliquetta.methods.building.mixtures import linear_discriminant
from cliquetta.methods.building.views import SelectiveConfig, ViewKind, confident_views
from cliquetta.methods.registry import register
from cliquetta.types import Prediction

FIRST_MEAN = 1e-3  # Every coordinate of the means before the first image.


@dataclass(frozen=True)
class DOTAConfig(SelectiveConfig):
    """Online Gaussian discriminant analysis with its authors' setting for ImageNet."""

    views: Count = 1
    view_kind: ViewKind = "augmix"
    initial_variance: Positive = 2e-3
    """σ²: variance of every dimension before the first image."""
    shrinkage: Fraction = 1e-4
    """ε: share of the identity in the covariance that is inverted."""
    weight_per_count: NonNegative = 0.005
    """ρ: weight of the Gaussian prediction per image that a class was counted for, on average."""
    largest_weight: NonNegative = 0.2
    """η: where that weight stops growing; 0 is zero-shot CLIP."""


def update_gaussians(
    means: Tensor,
    covariances: Tensor,
    counts: Tensor,
    features: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Means (N, E), covariances (N, E, E) and counts (N,) after features (B, E), weights (B, N)."""
    total = counts + weights.sum(dim=0)
    centred = features - means[:, None]  # (N, B, E)
    added = (centred * (weights.T / total[:, None])[:, :, None]).mT
    covariances = torch.baddbmm(
        covariances * (counts / total)[:, None, None], added, centred
    )
    return (
        (counts[:, None] * means + weights.T @ features) / total[:, None],
        covariances,
        total,
    )


@register(
    "dota", tuned=read_presets("dota", DOTAConfig), setting="CLIP ViT-B/16, ImageNet"
)
class DOTA(FixedText):
    """Running Gaussian estimates of all classes predict beside the text; no training."""

    batch_dependence = BatchDependence.SEQUENTIAL
    config: DOTAConfig

    def _setup(self) -> None:
        super()._setup()
        N, E = self.classifier.shape
        eye = torch.eye(E, dtype=self.classifier.dtype, device=self.classifier.device)
        self.memory.declare(
            "means", torch.full_like(self.classifier, FIRST_MEAN), SHORT
        )
        covariances = (self.config.initial_variance * eye).repeat(N, 1, 1)
        self.memory.declare("covariances", covariances, VARIANCE)
        self.memory.declare("counts", self.classifier.new_ones(N), NON_NEGATIVE)

    def _predict_features(self, features: Tensor) -> Prediction:
        return Prediction(
            torch.stack([self._predict_image(views) for views in features]).float()
        )

    def _predict_image(self, views: Tensor) -> Tensor:
        """Logits (N,) of an image with views (V, E), which is learned from afterwards."""
        config, memory = self.config, self.memory
        logits = self.scale * views @ self.classifier.T
        sure = confident_views(logits, config.selection_fraction)
        logits, views = logits[sure], views[sure]
        shared = memory["covariances"].mean(dim=0)
        shared = (1 - config.shrinkage) * shared
        shared.diagonal().add_(config.shrinkage)
        gaussian = linear_discriminant(
            views.mean(dim=0, keepdim=True), memory["means"], shared
        )[0]
        weight = config.weight_per_count / len(views) * memory["counts"].mean()
        state = memory["means"], memory["covariances"], memory["counts"]
        state = update_gaussians(*state, views, logits.softmax(dim=-1))
        memory["means"], memory["covariances"], memory["counts"] = state
        return logits.mean(dim=0) + weight.clamp(max=config.largest_weight) * gaussian
