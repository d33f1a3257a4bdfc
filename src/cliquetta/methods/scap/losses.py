"""The loss of a clique: entropy of its mean feature, and concentration around it (Eq. 5-10)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.entropy import log_prob_entropy
from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.model.clip import l2_normalize

CELLS = 2**24
"""Entries of the matrix of cliques and memberships that are held at once."""


class CliqueLosses(NamedTuple):
    """Losses of U cliques and what they were computed from."""

    entropy: Tensor
    """(U,), Eq. 9."""
    concentration: Tensor
    """(U,), Eq. 10."""
    total: Tensor
    """(U,), Eq. 14."""
    attributes: Tensor
    """Mean features (U, E), Eq. 5; not normalised."""

    def detach(self) -> CliqueLosses:
        """The same without gradients."""
        return CliqueLosses(*(value.detach() for value in self))


class Members(NamedTuple):
    """Unit features (M, E) of the members of U cliques: row r is of clique ``clique[r]``."""

    features: Tensor
    clique: Tensor
    cliques: int


def clique_sum(rows: Tensor, clique: Tensor, count: int) -> Tensor:
    """Sum (U, ...) of the rows of every clique; row r is of clique ``clique[r]``.

    A matrix product, because scattered additions have no fixed order on a GPU; some cliques at a
    time, so that the matrix of who belongs where stays small.
    """
    flat, parts = rows.flatten(1), []
    for some in torch.split(torch.arange(count, device=rows.device), max(1, CELLS // len(rows))):
        parts.append((some[:, None] == clique).to(rows.dtype) @ flat)
    return torch.cat(parts).view(count, *rows.shape[1:])


def attribute_features(features: Tensor, clique: Tensor, count: int) -> Tensor:
    """Mean feature (U, E) of every clique (Eq. 5)."""
    return clique_sum(features, clique, count) / clique_sizes(clique, count)[:, None]


def clique_sizes(clique: Tensor, count: int) -> Tensor:
    """Size of every clique, float."""
    ones = torch.ones(len(clique), 1, device=clique.device)  # bincount would wait for the device
    return clique_sum(ones, clique, count)[:, 0].clamp_min(1)


def queries(members: Members, kind: str) -> tuple[Tensor, Tensor]:
    """Features that are classified, and the clique of each: mean features, or all members.

    The entropies are functions of ``scale * queries @ text.T`` alone, which is what makes the
    gradient of the text cheap: it is a product of this and of the logits' gradient.
    """
    features, clique, count = members
    if kind == "mean-feature":
        mean = l2_normalize(attribute_features(features, clique, count))
        return mean, torch.arange(count, device=features.device)
    return features, clique


def query_logits(query_features: Tensor, owner: Tensor, text: Tensor, scale: float) -> Tensor:
    """Logits (Q, N) of queries; ``text`` is (N, E) for all, or (U, N, E), one for each clique."""
    if text.ndim == 2:
        return scale * query_features @ text.T
    return scale * torch.einsum("re,rne->rn", query_features, text[owner])


def entropy_loss(logits: Tensor, clique: Tensor, count: int, kind: str) -> Tensor:
    """Entropy (U,) of every clique from the logits of its queries (Eq. 7-9 and its variants)."""
    log_p = logits.log_softmax(dim=-1)
    if kind == "mean-feature":
        return log_prob_entropy(log_p)
    size = clique_sizes(clique, count)
    if kind == "mean-entropy":
        return clique_sum(log_prob_entropy(log_p)[:, None], clique, count)[:, 0] / size
    p = clique_sum(log_p.exp(), clique, count) / size[:, None]
    # Where no member has any mass, log p and its slope would be infinite, and 0 times that NaN.
    return -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(dim=-1)


def concentration_loss(features: Tensor, clique: Tensor, attributes: Tensor, form: str) -> Tensor:
    """Squared distances (U,) of members to their clique's mean feature (Eq. 10)."""
    count = len(attributes)
    squared = (features - attributes[clique]).square().sum(dim=1)
    total = clique_sum(squared[:, None], clique, count)[:, 0]
    return total if form == "sum" else total / clique_sizes(clique, count)


def clique_losses(
    members: Members, logits: Tensor, owner: Tensor, config: SCAPConfig
) -> CliqueLosses:
    """Losses of all cliques, from the ``logits`` of their :func:`queries` and the cliques' own."""
    features, clique, count = members
    attributes = attribute_features(features, clique, count)
    certainty = entropy_loss(logits, owner, count, config.entropy)
    spread = concentration_loss(features, clique, attributes, config.concentration_form)
    total = certainty + config.concentration * spread
    return CliqueLosses(certainty, spread, total, attributes)
