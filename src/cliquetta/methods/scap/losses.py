"""What a clique is taught by: certainty of its mean feature, and concentration around it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.model.clip import l2_normalize


@dataclass(frozen=True)
class CliqueLosses:
    """Losses of U cliques and what they were computed from."""

    entropy: Tensor
    """(U,), Eq. 9."""
    concentration: Tensor
    """(U,), Eq. 10."""
    total: Tensor
    """(U,), Eq. 15."""
    attributes: Tensor
    """Mean features (U, E), Eq. 5; not normalised."""


def clique_sum(rows: Tensor, clique: Tensor, count: int) -> Tensor:
    """Sum (U, ...) of the rows of every clique; row r is of clique ``clique[r]``.

    A matrix product, because scattered additions have no fixed order on a GPU.
    """
    belongs = torch.arange(count, device=rows.device)[:, None] == clique
    return (belongs.to(rows.dtype) @ rows.flatten(1)).view(count, *rows.shape[1:])


def attribute_features(features: Tensor, clique: Tensor, count: int) -> Tensor:
    """Mean feature (U, E) of every clique (Eq. 5)."""
    return clique_sum(features, clique, count) / members(clique, count)[:, None]


def members(clique: Tensor, count: int) -> Tensor:
    """Size of every clique, float."""
    return torch.bincount(clique, minlength=count).clamp_min(1).float()


def entropy(log_p: Tensor) -> Tensor:
    """Entropy of log-probabilities (..., N) (Eq. 9)."""
    return -(log_p.exp() * log_p).sum(dim=-1)


def queries(features: Tensor, clique: Tensor, count: int, kind: str) -> tuple[Tensor, Tensor]:
    """What is classified, and the clique of each: mean features, or all members.

    The entropies are functions of ``scale * queries @ text.T`` alone, which is what makes the
    gradient of the text cheap: it is a product of this and of the logits' gradient.
    """
    if kind == "mean-feature":
        mean = l2_normalize(attribute_features(features, clique, count))
        return mean, torch.arange(count, device=features.device)
    return features, clique


def entropy_loss(logits: Tensor, clique: Tensor, count: int, kind: str) -> Tensor:
    """Entropy (U,) of every clique from the logits of its queries (Eq. 7-9 and its variants)."""
    log_p = logits.log_softmax(dim=-1)
    if kind == "mean-feature":
        return entropy(log_p)
    size = members(clique, count)
    if kind == "mean-entropy":
        return clique_sum(entropy(log_p)[:, None], clique, count)[:, 0] / size
    p = clique_sum(log_p.exp(), clique, count) / size[:, None]
    # Where no member has any mass, log p and its slope would be infinite, and 0 times that NaN.
    return -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(dim=-1)


def concentration_loss(features: Tensor, clique: Tensor, attributes: Tensor, form: str) -> Tensor:
    """Squared distances (U,) of members to their clique's mean feature (Eq. 10)."""
    count = len(attributes)
    squared = (features - attributes[clique]).square().sum(dim=1)
    total = clique_sum(squared[:, None], clique, count)[:, 0]
    return total if form == "sum" else total / members(clique, count)


def clique_losses(
    features: Tensor,
    clique: Tensor,
    count: int,
    text: Tensor,
    scale: float,
    config: SCAPConfig,
) -> CliqueLosses:
    """Losses of all cliques from unit member features (M, E).

    ``text`` is (N, E) for all cliques, or (U, N, E) with one set of text features each.
    """
    attributes = attribute_features(features, clique, count)
    asked, owner = queries(features, clique, count, config.entropy)
    if text.ndim == 2:
        logits = scale * asked @ text.T
    else:
        logits = scale * torch.einsum("re,rne->rn", asked, text[owner])
    certainty = entropy_loss(logits, owner, count, config.entropy)
    spread = concentration_loss(features, clique, attributes, config.concentration_form)
    total = certainty + config.concentration * spread
    return CliqueLosses(certainty, spread, total, attributes)
