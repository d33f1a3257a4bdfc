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

from cliquetta.methods.building.base import BatchDependence
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
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.views import SelectiveConfig, ViewKind, confident_views
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
    """Count features (B, E) for classes by ``weights`` (B, N).

    Returns:
        Means (N, E), covariances (N, E, E) and counts (N,) after them.

    """
    # c_k + ŷ_k
    total = counts + weights.sum(dim=0)

    # μ_k ← (c_k μ_k + ŷ_k f) / (c_k + ŷ_k)
    summed = counts[:, None] * means + weights.T @ features
    new_means = summed / total[:, None]

    # Σ_k ← (c_k Σ_k + ŷ_k (f - μ_k)(f - μ_k)ᵀ) / (c_k + ŷ_k), with the mean before f
    faded = covariances * (counts / total)[:, None, None]
    shares = weights.T / total[:, None]  # (N, B)

    # residuals are (N, B, E)
    residuals = features - means[:, None]
    weighted = residuals * shares[:, :, None]
    new_covariances = torch.baddbmm(faded, weighted.mT, residuals)
    return new_means, new_covariances, total


@register(
    "dota", tuned=read_presets("dota", DOTAConfig), setting="CLIP ViT-B/16, ImageNet"
)
class DOTA(FixedText):
    """Running Gaussian estimates of all classes predict beside the text; no training."""

    batch_dependence = BatchDependence.SEQUENTIAL
    config: DOTAConfig

    def _setup(self) -> None:
        super()._setup()
        text = self.classifier
        classes, width = text.shape

        # a mean of 0.001 in all dimensions
        self.memory.declare("means", torch.full_like(text, FIRST_MEAN), SHORT)

        # the covariance σ²I
        identity = torch.eye(width, dtype=text.dtype, device=text.device)
        covariance = self.config.initial_variance * identity
        self.memory.declare("covariances", covariance.repeat(classes, 1, 1), VARIANCE)

        # and the weight of one image
        self.memory.declare("counts", text.new_ones(classes), NON_NEGATIVE)

    def _predict_features(self, features: Tensor) -> Prediction:
        logits = [self._predict_image(views) for views in features]
        return Prediction(torch.stack(logits).float())

    def _predict_image(self, views: Tensor) -> Tensor:
        """Predict an image by its views (V, E), then learn from it: logits (N,)."""
        config = self.config
        means = self.memory["means"]
        covariances = self.memory["covariances"]
        counts = self.memory["counts"]

        # only the confident views predict and teach
        logits = self.scale * views @ self.classifier.T
        confident = confident_views(logits, config.selection_fraction)
        logits = logits[confident]
        views = views[confident]

        # Λ⁻¹ = (1 - ε) mean_k Σ_k + ε I
        shared = (1 - config.shrinkage) * covariances.mean(dim=0)
        shared.diagonal().add_(config.shrinkage)

        # g(f) = fᵀΛμ_k - ½ μ_kᵀΛμ_k
        feature = views.mean(dim=0, keepdim=True)
        gaussian = linear_discriminant(feature, means, shared)[0]

        # λ = min(ρ · mean_k c_k, η), where the views of an image count as one
        weight = config.weight_per_count / len(views) * counts.mean()
        weight = weight.clamp(max=config.largest_weight)
        prediction = logits.mean(dim=0) + weight * gaussian

        # learned from after it was predicted
        means, covariances, counts = update_gaussians(
            means, covariances, counts, features=views, weights=logits.softmax(dim=-1)
        )
        self.memory["means"] = means
        self.memory["covariances"] = covariances
        self.memory["counts"] = counts
        return prediction
