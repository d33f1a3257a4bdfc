"""MOON: explain a batch by von Mises-Fisher classes that stay at their text unless present.

Huang et al., Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic
Test-Time Transduction, ICML 2026. Features on the unit sphere are a mixture of one
vMF(μ_k, κ_k) per class, shrunk towards anchors at the texts by a KL term of weight α_k
= 1 / λ_k. λ_k is large for classes that the zero-shot predictions ŷ of the batch
contain and small for the others, which therefore stay at their text; images count by
their certainty γ_i. Ten rounds of

    z_ik ∝ ŷ_ik exp(κ_k μ_k·f_i + log C(κ_k) + Σ_j ω_ij z_jk)                            (12)
    A(κ_k) μ_k = β_k v_k + (1 - β_k) t_k,   β_k = n_k / (n_k + α_k)                      (14)

with v_k the mean of the images weighted by γ_i z_ik, n_k the certain images assigned to
k and ω the cosines of the three nearest neighbours. Written from the paper alone,
without its code.
"""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.config import Count, MethodConfig
from cliquetta.methods.building.entropy import log_prob_entropy
from cliquetta.methods.building.feature_level import Transductive
from cliquetta.methods.building.mixtures import (
    nearest_affinity,
    propagate,
    weighted_means,
)
from cliquetta.methods.building.registry import register

# Mean lengths between which κ is finite and positive.
SHORTEST = 1e-3
LONGEST = 1 - 1e-4
# Least weight that something is divided by, or of which a logarithm is taken.
TINY = 1e-12


@dataclass(frozen=True)
class MOONConfig(MethodConfig):
    """Transduction with dynamic shrinkage within each batch."""

    neighbours: Count = 3
    """m: nearest neighbours of an image by cosine, excluding itself."""
    rounds: Count = 10  # T: updates of the assignments and of the distributions.


def class_presence(prior: Tensor) -> Tensor:
    """Return λ (N,) = √(mean · largest) of zero-shot predictions (B, N), eq. (11)."""
    return (prior.mean(dim=0) * prior.amax(dim=0)).sqrt()


def certainty(logs: Tensor) -> Tensor:
    """Return γ (B,) = 1 - H(z_i) / log N of log assignments (B, N), eq. (9)."""
    uncertainty = log_prob_entropy(logs) / math.log(max(2, logs.shape[1]))
    return (1 - uncertainty).clamp(0, 1)


def concentration(length: Tensor, width: int) -> Tensor:
    """Return κ of a mean of this length in ``width`` dimensions, eq. (15).

    Banerjee's approximation.
    """
    length = length.clamp(SHORTEST, LONGEST)
    return (width * length - length**3) / (1 - length**2)


def vmf_log_likelihood(features: Tensor, directions: Tensor, kappa: Tensor) -> Tensor:
    """Return κ_k μ_k·f_i + log C(κ_k), (B, N), eq. (6).

    log C(κ) = (E - 1)/2 log κ - κ, eq. (51).
    """
    normaliser = (features.shape[1] - 1) / 2 * kappa.log() - kappa
    return kappa * (features @ directions.T) + normaliser


def anchor_length(features: Tensor, prior: Tensor, text: Tensor) -> Tensor:
    """Return A(κ'_k) (N,), eq. (7).

    Mean of 1 - |f_i - t_k|²/2 = f_i·t_k, weighted by ``prior`` (B, N).
    """
    weights = prior / prior.sum(dim=0).clamp_min(TINY)  # (B, N)
    length = (weights * (features @ text.T)).sum(dim=0)
    return length.clamp(SHORTEST, LONGEST)


def shrunk_means(
    features: Tensor, logs: Tensor, text: Tensor, anchor_weight: Tensor
) -> Tensor:
    """Return A(κ_k) μ_k (N, E), between the batch's means and texts, eqs. (14), (19).

    Args:
        features: Unit features (B, E).
        logs: Log assignments (B, N).
        text: Unit class texts (N, E).
        anchor_weight: α (N,).

    """
    # v_k: the mean of the images weighted by γ_i z_ik
    gamma = certainty(logs)
    log_weights = gamma.clamp_min(TINY).log()[:, None] + logs
    empirical = weighted_means(features, log_weights)

    # n_k: the certain images assigned to class k
    labels = logs.argmax(dim=-1)
    member = F.one_hot(labels, logs.shape[1]).to(gamma.dtype)
    count = gamma @ member

    # β_k v_k + (1 - β_k) t_k with β_k = n_k / (n_k + α_k), eq. (14)
    beta = (count / (count + anchor_weight))[:, None]
    return beta * empirical + (1 - beta) * text


def transduce(
    features: Tensor, log_prior: Tensor, text: Tensor, config: MOONConfig
) -> Tensor:
    """Assign images to classes by mixture and neighbours.

    Args:
        features: Unit features (B, E).
        log_prior: Zero-shot log-probabilities (B, N).
        text: Unit class texts (N, E).
        config: Settings.

    Returns:
        Log assignments (B, N).

    """
    prior = log_prior.exp()
    # ω: cosines of the nearest neighbours
    links = nearest_affinity(features @ features.T, config.neighbours)

    # α_k = 1 / λ_k: absent classes stay at their text, eq. (10)
    anchor_weight = 1 / class_presence(prior).clamp_min(TINY)
    means = anchor_length(features, prior, text)[:, None] * text
    logs = log_prior
    for _ in range(config.rounds):
        # lengths A(κ_k) and directions μ_k of the means
        kappa = concentration(means.norm(dim=-1), features.shape[1])
        directions = F.normalize(means, dim=-1)
        # z_ik ∝ ŷ_ik exp(κ_k μ_k·f_i + log C(κ_k) + Σ_j ω_ij z_jk), eq. (12)
        likelihood = vmf_log_likelihood(features, directions, kappa)
        logs = propagate(log_prior + likelihood, links, logs, 1)
        means = shrunk_means(features, logs, text, anchor_weight)
    return logs


@register("moon", setting="all datasets", for_batches=True)
class MOON(Transductive):
    """Per batch: von Mises-Fisher classes, held at their text unless present; no training."""

    config: MOONConfig
    transduce = staticmethod(transduce)
