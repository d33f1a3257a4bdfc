"""TransCLIP: explain a batch by one Gaussian per class, neighbours and the zero-shot predictions.

Zanella et al., Boosting Vision-Language Models with Transduction, NeurIPS 2024; the
zero-shot variant. Of unit features f_i it seeks assignments z_i on the simplex, unit
class means μ_k and one diagonal covariance σ² for all, which trade off Gaussian
likelihood, agreement with the nearest neighbours and closeness to the zero-shot
predictions ŷ_i:

    z_ik ∝ ŷ_ik^λ exp( -Σ_d (f_id - μ_kd)² / σ_d² / (2τ) + Σ_j (w_ij + w_ji) z_jk / (2·neighbours) )

five times over, then μ_k = normalised mean of f weighted by z_k, σ² = mean squared
residual; ten rounds. τ is 50; w_ij is the cosine of the three nearest neighbours of i,
else 0.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.config import Count, MethodConfig, NonNegative, Positive
from cliquetta.methods.building.feature_level import Transductive
from cliquetta.methods.building.mixtures import (
    nearest_affinity,
    propagate,
    weighted_means,
)
from cliquetta.methods.building.registry import register

# Usual: 1 / E; equal images have no spread, by which nothing may be divided.
VARIANCE_FLOOR = 1e-6


@dataclass(frozen=True)
class TransCLIPConfig(MethodConfig):
    """Transduction within each batch."""

    text_weight: NonNegative = 1.0  # λ: exponent of the zero-shot probabilities.
    gaussian_temperature: Positive = 50.0  # τ: divides the Gaussian log-likelihood.
    neighbours: Count = 3  # Nearest neighbours of an image by cosine, excluding itself.
    init_images: Count = 8
    """Most confident images of a class from which its mean is initialised."""
    rounds: Count = 10
    """Updates of the means and the variance; the assignments are updated once more after them."""
    inner_steps: Count = 5  # Updates of the assignments in each round.


def neighbour_links(features: Tensor, neighbours: int) -> Tensor:
    """Return (w_ij + w_ji) / (2·neighbours), (B, B), of unit features (B, E)."""
    affinity = nearest_affinity(features @ features.T, neighbours)
    return (affinity + affinity.T) / (2 * neighbours)


def first_means(features: Tensor, prior: Tensor, seeds: int) -> Tensor:
    """Average each class's surest images by ``prior`` (B, N): unit means (N, E)."""
    # the surest images of each class, (S, N)
    weights, chosen = prior.topk(min(seeds, len(prior)), dim=0)
    weights = weights / weights.sum(dim=0)

    # their mean, of which only the direction counts
    means = torch.einsum("sn,sne->ne", weights, features[chosen])
    return F.normalize(means, dim=-1)


def gaussian_log_likelihood(
    features: Tensor, means: Tensor, variance: Tensor
) -> Tensor:
    """Return -½ Σ_d (f_id - μ_kd)² / σ_d², (B, N)."""
    distances = torch.cdist(
        features * variance.rsqrt(),
        means * variance.rsqrt(),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    return -0.5 * distances.square()


def update_variance(features: Tensor, means: Tensor, assignments: Tensor) -> Tensor:
    """Average squared residuals over images and classes, by assignment: σ² (E,)."""
    # Σ_k z_ik (f - μ_k)² without a tensor over images, classes and dimensions
    mixed = assignments @ means  # Σ_k z_ik μ_k
    crossed = 2 * features * mixed
    squared = features.square() - crossed + assignments @ means.square()

    # images without spread have the least variance
    return squared.mean(dim=0).clamp_min(VARIANCE_FLOOR)


def transduce(
    features: Tensor, log_prior: Tensor, _: Tensor, config: TransCLIPConfig
) -> Tensor:
    """Assign images to classes by Gaussians, neighbours and zero-shot predictions.

    Args:
        features: Unit features (B, E).
        log_prior: Zero-shot log-probabilities (B, N).
        _: The class texts, which only the prior needs.
        config: Settings.

    Returns:
        Log assignments (B, N).

    """
    links = neighbour_links(features, config.neighbours)

    # log ŷ^λ
    weighted_prior = config.text_weight * log_prior
    means = first_means(features, log_prior.exp(), config.init_images)
    variance = torch.full_like(features[0], 1 / features.shape[1])
    logs = log_prior
    for updates in range(config.rounds + 1):
        # μ_k: normalised mean of f weighted by z_k; σ²: mean squared residual
        if updates:
            means = F.normalize(weighted_means(features, logs), dim=-1)
            variance = update_variance(features, means, logs.exp())

        # z_ik ∝ ŷ_ik^λ exp(-Σ_d (f_id - μ_kd)² / σ_d² / (2τ) + neighbours' share),
        # five times over
        likelihood = gaussian_log_likelihood(features, means, variance)
        fixed = weighted_prior.add(likelihood, alpha=1 / config.gaussian_temperature)
        logs = propagate(fixed, links, logs, config.inner_steps)
    return logs


@register("transclip", for_batches=True)
class TransCLIP(Transductive):
    """Per batch: Gaussian classes, nearest neighbours and zero-shot predictions combined."""

    config: TransCLIPConfig
    transduce = staticmethod(transduce)
