"""Loss of a clique: entropy of its mean feature, concentration (Eq. 5-10).

All cliques at once: a row for every membership, and the number of the clique that it
belongs to. A loss depends on the members only, so equal cliques of several classes have
one number: ``U`` counts the distinct member sets, ``M`` their memberships.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.entropy import log_prob_entropy
from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.released import Rules
from cliquetta.model.clip import l2_normalize

# Entries of the matrix of cliques and memberships that are held at once.
CELLS = 2**24


class CliqueLosses(NamedTuple):
    """Losses of U cliques and what they were computed from."""

    entropy: Tensor  # (U,), Eq. 9.
    concentration: Tensor  # (U,), Eq. 10.
    total: Tensor  # (U,), Eq. 14.
    attributes: Tensor  # Mean features (U, E), Eq. 5; not normalised.


class Members(NamedTuple):
    """Unit features (M, E) of members: row r is of clique ``clique[r]``."""

    features: Tensor
    clique: Tensor
    cliques: int


def clique_sum(rows: Tensor, clique: Tensor, count: int) -> Tensor:
    """Sum the rows (M, ...) of every clique, (U, ...); row r is of ``clique[r]``."""
    # A matrix product, because scattered additions have no fixed order on a GPU.
    flat = rows.flatten(1)
    at_once = max(1, CELLS // len(rows))
    cliques = torch.arange(count, device=rows.device)

    sums = []
    for some in torch.split(cliques, at_once):
        # (some cliques, M): 1 where a row is a member's.
        is_member = some[:, None] == clique
        weight = is_member.to(rows.dtype)
        sums.append(weight @ flat)
    return torch.cat(sums).view(count, *rows.shape[1:])


def clique_sizes(clique: Tensor, count: int) -> Tensor:
    """Count the members (U,) of every clique, as floats."""
    # bincount would wait for the device.
    ones = torch.ones(len(clique), 1, device=clique.device)
    return clique_sum(ones, clique, count)[:, 0].clamp_min(1)


def attribute_features(features: Tensor, clique: Tensor, count: int) -> Tensor:
    """Average the features of every clique: its attribute (U, E) (Eq. 5)."""
    return clique_sum(features, clique, count) / clique_sizes(clique, count)[:, None]


def classify(
    members: Members, text: Tensor, scale: float, rules: Rules
) -> tuple[Members, Tensor]:
    """Compute the logits (Q, N) of every clique's queries (inside Eq. 8).

    The query of a clique is its mean feature, or each of its members where the rules
    are the released code's.

    Args:
        members: Features of the members.
        text: Class texts (N, E) for all cliques, or (U, N, E), one list for each.
        scale: 1 / tau of Eq. 8.
        rules: Whether members are queries.

    Returns:
        The queries, and their scaled cosines with the texts.

    """
    queries = members
    # Eq. 5: the attribute a_ik, as a unit vector for the cosine of Eq. 8.
    if not rules.member_entropy:
        mean = attribute_features(members.features, members.clique, members.cliques)
        unit = l2_normalize(mean)
        own_clique = torch.arange(members.cliques, device=unit.device)
        queries = Members(unit, own_clique, members.cliques)

    # Eq. 8: cos(a_ik, f_n^T) / tau.
    if text.ndim == 2:
        logits = scale * queries.features @ text.T
    else:
        own_text = text[queries.clique]
        logits = scale * torch.einsum("re,rne->rn", queries.features, own_text)
    return queries, logits


def entropy_loss(logits: Tensor, clique: Tensor, count: int, rules: Rules) -> Tensor:
    """Compute the entropy (U,) of every clique from its queries' logits (Eq. 7-9)."""
    log_p = logits.log_softmax(dim=-1)  # Eq. 7-8
    each = log_prob_entropy(log_p)  # Eq. 9
    if not rules.member_entropy:
        return each
    # The released code's mean over the members.
    total = clique_sum(each[:, None], clique, count)[:, 0]
    return total / clique_sizes(clique, count)


def concentration_loss(
    features: Tensor, clique: Tensor, means: Tensor, rules: Rules
) -> Tensor:
    """Sum the squared distances (U,) of members to their clique's mean (Eq. 10)."""
    count = len(means)
    distance = features - means[clique]
    squared = distance.square().sum(dim=1)
    total = clique_sum(squared[:, None], clique, count)[:, 0]
    # The released code's mean over the members.
    if rules.mean_concentration:
        total = total / clique_sizes(clique, count)
    return total


def clique_losses(
    members: Members, logits: Tensor, owner: Tensor, config: SCAPConfig
) -> CliqueLosses:
    """Compute the losses of all cliques (Eq. 9, 10, 14).

    Args:
        members: Features of the members.
        logits: Those of the queries, from :func:`classify`.
        owner: The clique of each query.
        config: lambda and the rules.

    Returns:
        Losses and attribute features, a row per clique.

    """
    features, clique, count = members
    attributes = attribute_features(features, clique, count)

    entropy = entropy_loss(logits, owner, count, config.rules)
    concentration = concentration_loss(features, clique, attributes, config.rules)
    # Eq. 14, each clique's summand: L_en + lambda L_con.
    total = entropy + config.concentration * concentration
    return CliqueLosses(entropy, concentration, total, attributes)
