"""Soft clustering of features, for TransCLIP, StatA, MOON, OGA and DOTA.

A batch of unit features (B, E) is explained by one distribution per class. Assignments
are logarithms (B, N), so that classes of vanishing weight stay sound.
"""

import torch
from torch import Tensor


def nearest_affinity(similarity: Tensor, neighbours: int) -> Tensor:
    """Keep of W (B, B) each row's nearest others; 0 elsewhere and if negative."""
    # No row is its own neighbour.
    others = similarity.clone()
    others = others.fill_diagonal_(-float("inf"))
    count = min(neighbours, len(similarity) - 1)
    nearest = others.topk(count, dim=-1, sorted=False)

    links = torch.zeros_like(similarity)
    weights = nearest.values.clamp_min(0)
    return links.scatter(1, nearest.indices, weights)


def propagate(fixed: Tensor, links: Tensor, logs: Tensor, steps: int) -> Tensor:
    """Update log assignments (B, N) ``steps`` times: z ∝ exp(fixed + links z)."""
    assignments = logs.exp()

    # The last update stays a logarithm.
    for _ in range(steps - 1):
        scores = torch.addmm(fixed, links, assignments)
        assignments = scores.softmax(dim=-1)
    scores = torch.addmm(fixed, links, assignments)
    return scores.log_softmax(dim=-1)


def weighted_means(features: Tensor, log_weights: Tensor) -> Tensor:
    """Average features (B, E) under log weights (B, N), of any sum: means (N, E)."""
    weights = log_weights.softmax(dim=0)
    return weights.T @ features


def linear_discriminant(features: Tensor, means: Tensor, covariance: Tensor) -> Tensor:
    """Compute the Gaussian log-likelihood (B, N) up to what all classes share.

    That is xᵀΣ⁻¹μ_k - ½ μ_kᵀΣ⁻¹μ_k.
    """
    # Σ⁻¹μ_k in the columns (E, N), by the Cholesky factor of Σ.
    factor = torch.linalg.cholesky_ex(covariance).L
    weights = torch.cholesky_solve(means.T, factor)

    scores = features @ weights
    squared = (weights * means.T).sum(dim=0)
    return scores - 0.5 * squared
