"""The loss of a clique: entropy of its mean feature, and concentration around it (Eq. 5-10)."""

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.entropy import log_prob_entropy
from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.released import Rules
from cliquetta.model.clip import l2_normalize

CELLS = 2**24  # Entries of the matrix of cliques and memberships that are held at once.


class CliqueLosses(NamedTuple):
    """Losses of U cliques and what they were computed from."""

    entropy: Tensor  # (U,), Eq. 9.
    concentration: Tensor  # (U,), Eq. 10.
    total: Tensor  # (U,), Eq. 14.
    attributes: Tensor  # Mean features (U, E), Eq. 5; not normalised.


class Members(NamedTuple):
    """Unit features (M, E) of the members of U cliques: row r is of clique ``clique[r]``."""

    features: Tensor
    clique: Tensor
    cliques: int


def clique_sum(rows: Tensor, clique: Tensor, count: int) -> Tensor:
    """Sum (U, ...) of the rows of every clique; row r is of clique ``clique[r]``.

    A matrix product, because scattered additions have no fixed order on a GPU.
    """
    flat, parts = rows.flatten(1), []
    for some in torch.split(
        torch.arange(count, device=rows.device), max(1, CELLS // len(rows))
    ):
        parts.append((some[:, None] == clique).to(rows.dtype) @ flat)
    return torch.cat(parts).view(count, *rows.shape[1:])


def attribute_features(features: Tensor, clique: Tensor, count: int) -> Tensor:
    """Mean feature (U, E) of every clique (Eq. 5)."""
    return clique_sum(features, clique, count) / clique_sizes(clique, count)[:, None]


def clique_sizes(clique: Tensor, count: int) -> Tensor:
    """Size of every clique, float."""
    ones = torch.ones(
        len(clique), 1, device=clique.device
    )  # bincount would wait for the device
    return clique_sum(ones, clique, count)[:, 0].clamp_min(1)


def classify(
    members: Members, text: Tensor, scale: float, rules: Rules
) -> tuple[Members, Tensor]:
    """Queries, which are the mean features or all members, and their logits (Q, N).

    ``text`` is (N, E) for all, or (U, N, E), one for each clique.
    """
    queries, clique, count = members
    if not rules.member_entropy:
        queries = l2_normalize(attribute_features(queries, clique, count))
        clique = torch.arange(count, device=queries.device)
    if text.ndim == 2:
        logits = scale * queries @ text.T
    else:
        logits = scale * torch.einsum("re,rne->rn", queries, text[clique])
    return Members(queries, clique, count), logits


def entropy_loss(logits: Tensor, clique: Tensor, count: int, rules: Rules) -> Tensor:
    """Entropy (U,) of every clique from the logits of its queries (Eq. 7-9)."""
    each = log_prob_entropy(logits.log_softmax(dim=-1))
    if not rules.member_entropy:
        return each
    return clique_sum(each[:, None], clique, count)[:, 0] / clique_sizes(clique, count)


def concentration_loss(
    features: Tensor, clique: Tensor, means: Tensor, rules: Rules
) -> Tensor:
    """Squared distances (U,) of members to their clique's mean feature (Eq. 10)."""
    count = len(means)
    squared = (features - means[clique]).square().sum(dim=1)
    total = clique_sum(squared[:, None], clique, count)[:, 0]
    return total / clique_sizes(clique, count) if rules.mean_concentration else total


def clique_losses(
    members: Members, logits: Tensor, owner: Tensor, config: SCAPConfig
) -> CliqueLosses:
    """Losses of all cliques, from the ``logits`` of their queries and the ``owner`` of each."""
    features, clique, count = members
    attributes = attribute_features(features, clique, count)
    certainty = entropy_loss(logits, owner, count, config.rules)
    spread = concentration_loss(features, clique, attributes, config.rules)
    total = certainty + config.concentration * spread
    return CliqueLosses(certainty, spread, total, attributes)
