"""StatA: Gaussian classes of a batch, anchored at the statistics that the texts predict.

Zanella et al., Realistic Test-Time Adaptation of Vision-Language Models, CVPR 2025. As
TransCLIP, but with a diagonal covariance per class and a KL term that holds class k at
N(t_k, Σ') unless the batch has images of it. With ŷ the zero-shot predictions and n_k
the images assigned to k

    z_ik ∝ ŷ_ik exp( log N(f_i; μ_k, Σ_k) / τ + Σ_j (w_ij + w_ji) z_jk / (2·neighbours) )
    μ_k = normalised β_k v_k/|v_k| + (1 - β_k) t_k,   β_k = n_k / (n_k + α)
    Σ_k = β_k T_k + (1 - β_k) (Σ' + (t_k - μ_k)²)

where v_k and T_k are the weighted mean of the images of k and their mean squared
distance from μ_k, Σ' is the mean squared distance of images from the texts weighted by
ŷ, τ = 50. α = 1; five assignment updates, then ten rounds of the means, the variances
and five assignment updates. Each batch by itself; nothing is remembered.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.config import Count, MethodConfig, Positive
from cliquetta.methods.building.feature_level import Transductive
from cliquetta.methods.building.mixtures import propagate
from cliquetta.methods.building.registry import register
from cliquetta.methods.transclip import (
    VARIANCE_FLOOR,
    neighbour_links,
    update_variance,
)


@dataclass(frozen=True)
class StatAConfig(MethodConfig):
    """Anchored transduction within each batch."""

    anchor_weight: Positive = 1.0
    """α: images of a class at which batch and text have equal say."""
    gaussian_temperature: Positive = 50.0  # τ: divides the Gaussian log-likelihood.
    neighbours: Count = 3  # Nearest neighbours of an image by cosine, excluding itself.
    rounds: Count = 10
    """Updates of means and covariances; assignments are updated before, too."""
    inner_steps: Count = 5  # Updates of the assignments each time.


def class_log_likelihood(moments: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """Return log N(f_i; μ_k, diag σ²_k) up to a constant, (B, N).

    Args:
        moments: f and f² of every image (B, 2E).
        means: μ (N, E).
        variances: σ² (N, E).

    """
    precision = variances.reciprocal()
    scaled = means * precision

    # -½ (f - μ)² / σ² = f·μ/σ² - ½ f²/σ² - ½ μ²/σ²
    factors = torch.cat([scaled, -0.5 * precision], dim=1)
    mixed = moments @ factors.T

    # μ²/σ² and log |Σ_k| are the same for all images
    constant = torch.addcmul(variances.log(), scaled, means).sum(dim=-1)
    return mixed.sub(constant, alpha=0.5)


def anchored_update(
    moments: Tensor,
    logs: Tensor,
    text: Tensor,
    anchor_variance: Tensor,
    anchor_weight: float,
) -> tuple[Tensor, Tensor]:
    """Estimate the classes from their images, anchored at the texts.

    Args:
        moments: f and f² of every image (B, 2E).
        logs: Log assignments (B, N).
        text: t (N, E).
        anchor_variance: Σ' (E,).
        anchor_weight: α.

    Returns:
        Means and variances (N, E).

    """
    # β_k = n_k / (n_k + α), with n_k the images assigned to class k
    labels = logs.argmax(dim=-1)
    count = F.one_hot(labels, logs.shape[1]).sum(dim=0, dtype=logs.dtype)
    beta = (count / (count + anchor_weight))[:, None]

    # means of f and f² over the images of a class
    weights = logs.softmax(dim=0).T  # (N, B)
    empirical, squares = (weights @ moments).chunk(2, dim=1)

    # μ_k = normalised β_k v_k/|v_k| + (1 - β_k) t_k
    means = torch.lerp(text, F.normalize(empirical, dim=-1), beta)
    means = F.normalize(means, dim=-1)

    # T_k: mean squared distance from μ_k, f² - 2 f μ_k + μ_k²
    scatter = torch.addcmul(squares, means, means.sub(empirical, alpha=2))

    # Σ_k = β_k T_k + (1 - β_k) (Σ' + (t_k - μ_k)²)
    offset = text - means
    anchored = torch.addcmul(anchor_variance, offset, offset)
    variances = torch.lerp(anchored, scatter, beta)
    return means, variances.clamp_min(VARIANCE_FLOOR)


def transduce(
    features: Tensor, log_prior: Tensor, text: Tensor, config: StatAConfig
) -> Tensor:
    """Assign images to classes by anchored Gaussians and neighbours.

    Args:
        features: Unit features (B, E).
        log_prior: Zero-shot log-probabilities (B, N).
        text: Unit class texts (N, E).
        config: Settings.

    Returns:
        Log assignments (B, N).

    """
    links = neighbour_links(features, config.neighbours)
    moments = torch.cat([features, features.square()], dim=1)

    # Σ': mean squared distance of images from the texts, weighted by ŷ
    anchor_variance = update_variance(features, text, log_prior.exp())
    means = text
    variances = anchor_variance.expand_as(text)
    logs = log_prior
    for updates in range(config.rounds + 1):
        if updates:
            means, variances = anchored_update(
                moments,
                logs,
                text=text,
                anchor_variance=anchor_variance,
                anchor_weight=config.anchor_weight,
            )

        # z_ik ∝ ŷ_ik exp(log N(f_i; μ_k, Σ_k) / τ + neighbours), five times
        likelihood = class_log_likelihood(moments, means, variances)
        fixed = log_prior.add(likelihood, alpha=1 / config.gaussian_temperature)
        logs = propagate(fixed, links, logs, config.inner_steps)
    return logs


@register("stata", setting="all datasets", for_batches=True)
class StatA(Transductive):
    """Per batch: Gaussian classes anchored at the texts; no training."""

    config: StatAConfig
    transduce = staticmethod(transduce)
