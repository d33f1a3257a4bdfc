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
from cliquetta.methods.building.mixtures import nearest_affinity, propagate
from cliquetta.methods.registry import register
from cliquetta.methods.transclip import VARIANCE_FLOOR, update_variance


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
    """Log N(f_i; μ_k, diag σ²_k) up to a constant, (B, N), for variances (N, E)."""
    precision = variances.reciprocal()
    scaled = means * precision
    # -½ (f - μ)² / σ² = f·μ/σ² - ½ f²/σ² - ½ μ²/σ²
    mixed = moments @ torch.cat([scaled, -0.5 * precision], dim=1).T
    constant = torch.addcmul(variances.log(), scaled, means).sum(dim=-1)
    return mixed.sub(constant, alpha=0.5)


def anchored_update(
    moments: Tensor,
    logs: Tensor,
    text: Tensor,
    anchor_variance: Tensor,
    anchor_weight: float,
) -> tuple[Tensor, Tensor]:
    """Means (N, E) and variances (N, E) of log assignments (B, N), shrunk to the text's."""
    weights = logs.softmax(dim=0).T  # (N, B), one per class
    count = F.one_hot(logs.argmax(dim=-1), logs.shape[1]).sum(dim=0, dtype=logs.dtype)
    beta = (count / (count + anchor_weight))[:, None]
    empirical, squares = (weights @ moments).chunk(2, dim=1)
    means = F.normalize(torch.lerp(text, F.normalize(empirical, dim=-1), beta), dim=-1)
    scatter = torch.addcmul(squares, means, means.sub(empirical, alpha=2))
    anchored = torch.addcmul(anchor_variance, text - means, text - means)
    return means, torch.lerp(anchored, scatter, beta).clamp_min(VARIANCE_FLOOR)


def transduce(
    features: Tensor, log_prior: Tensor, text: Tensor, config: StatAConfig
) -> Tensor:
    """Log assignments (B, N) of unit features (B, E), from zero-shot log-probabilities (B, N)."""
    affinity = nearest_affinity(features @ features.T, config.neighbours)
    links = (affinity + affinity.T) / (2 * config.neighbours)
    anchor_variance = update_variance(features, text, log_prior.exp())
    means, variances, logs = text, anchor_variance.expand_as(text), log_prior
    moments = torch.cat([features, features.square()], dim=1)  # each product needs both
    for updates in range(config.rounds + 1):
        if updates:
            anchor = text, anchor_variance, config.anchor_weight
            means, variances = anchored_update(moments, logs, *anchor)
        likelihood = class_log_likelihood(moments, means, variances)
        fixed = log_prior.add(likelihood, alpha=1 / config.gaussian_temperature)
        logs = propagate(fixed, links, logs, config.inner_steps)
    return logs


@register("stata", setting="all datasets", for_batches=True)
class StatA(Transductive):
    """Per batch: Gaussian classes anchored at the texts; no training."""

    config: StatAConfig
    transduce = staticmethod(transduce)
