"""Soft clustering of a batch of features: what TransCLIP, StatA, MOON, OGA and DOTA share.

A batch of unit features (B, E) is explained by one distribution per class. Assignments
are logarithms (B, N), so that classes of vanishing weight stay sound.
"""

import torch
from torch import Tensor


def nearest_affinity(similarity: Tensor, neighbours: int) -> Tensor:
    """W (B, B): similarity of each row with its nearest others; 0 elsewhere and if negative."""
    others = similarity.clone().fill_diagonal_(-float("inf"))
    nearest = others.topk(min(neighbours, len(similarity) - 1), dim=-1, sorted=False)
    return torch.zeros_like(similarity).scatter(
        1, nearest.indices, nearest.values.clamp_min(0)
    )


def propagate(fixed: Tensor, links: Tensor, logs: Tensor, steps: int) -> Tensor:
    """``steps`` updates z ∝ exp(fixed + links z) of log assignments ``logs`` (B, N)."""
    assignments = logs.exp()
    for _ in range(steps - 1):
        assignments = torch.addmm(fixed, links, assignments).softmax(dim=-1)
    return torch.addmm(fixed, links, assignments).log_softmax(dim=-1)


def weighted_means(features: Tensor, log_weights: Tensor) -> Tensor:
    """Means (N, E) of features (B, E) under log weights (B, N), which need not be normalised."""
    return log_weights.softmax(dim=0).T @ features


def linear_discriminant(features: Tensor, means: Tensor, covariance: Tensor) -> Tensor:
    """xᵀΣ⁻¹μ_k - ½ μ_kᵀΣ⁻¹μ_k, (B, N): Gaussian log-likelihood up to what all classes share."""
    factor = torch.linalg.cholesky_ex(covariance).L
    weights = torch.cholesky_solve(means.T, factor)  # (E, N)
    return features @ weights - 0.5 * (weights * means.T).sum(dim=0)
