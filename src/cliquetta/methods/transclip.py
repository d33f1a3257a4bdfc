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
from cliquetta.methods.registry import register

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


def first_means(features: Tensor, prior: Tensor, seeds: int) -> Tensor:
    """Unit means (N, E) of each class's most confident images, weighted by ``prior`` (B, N)."""
    weights, chosen = prior.topk(min(seeds, len(prior)), dim=0)  # (S, N)
    weights = weights / weights.sum(dim=0)
    return F.normalize(torch.einsum("sn,sne->ne", weights, features[chosen]), dim=-1)


def gaussian_log_likelihood(
    features: Tensor, means: Tensor, variance: Tensor
) -> Tensor:
    """-½ Σ_d (f_id - μ_kd)² / σ_d², (B, N)."""
    scaled = features * variance.rsqrt(), means * variance.rsqrt()
    return (
        -0.5
        * torch.cdist(*scaled, compute_mode="donot_use_mm_for_euclid_dist").square()
    )


def update_variance(features: Tensor, means: Tensor, assignments: Tensor) -> Tensor:
    """σ² (E,): squared residuals averaged over images and, by assignment, over classes."""
    # Σ_k z_ik (f - μ_k)² without a tensor over images, classes and dimensions
    mixed = assignments @ means
    squared = features.square() - 2 * features * mixed + assignments @ means.square()
    return squared.mean(dim=0).clamp_min(VARIANCE_FLOOR)


def transduce(
    features: Tensor, log_prior: Tensor, _: Tensor, config: TransCLIPConfig
) -> Tensor:
    """Log assignments (B, N) of unit features (B, E), from zero-shot log-probabilities (B, N)."""
    affinity = nearest_affinity(features @ features.T, config.neighbours)
    links = (affinity + affinity.T) / (2 * config.neighbours)
    means = first_means(features, log_prior.exp(), config.init_images)
    variance = torch.full_like(features[0], 1 / features.shape[1])
    logs, weighted_prior = log_prior, config.text_weight * log_prior
    for updates_left in range(config.rounds, -1, -1):
        likelihood = gaussian_log_likelihood(features, means, variance)
        fixed = weighted_prior.add(likelihood, alpha=1 / config.gaussian_temperature)
        logs = propagate(fixed, links, logs, config.inner_steps)
        if updates_left:
            means = F.normalize(weighted_means(features, logs), dim=-1)
            variance = update_variance(features, means, logs.exp())
    return logs


@register("transclip", for_batches=True)
class TransCLIP(Transductive):
    """Per batch: Gaussian classes, nearest neighbours and zero-shot predictions combined."""

    config: TransCLIPConfig
    transduce = staticmethod(transduce)
