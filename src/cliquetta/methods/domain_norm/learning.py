"""The loss of a domain, its learning rate, and the order in which images are remembered."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from cliquetta.methods._shared.entropy import log_prob_entropy


def certain_weights(count: int, confident_fraction: Tensor) -> Tensor:
    """Weights (count,), by rank of certainty, of a mean over the most certain images.

    The fraction () is on the device, so that the host need not know it.
    """
    kept = (confident_fraction * count).floor().clamp_min(1)
    return (torch.arange(count, device=kept.device) < kept).to(kept.dtype) / kept


def domain_loss(logits: Tensor, target: Tensor, certain: Tensor, diversity: float) -> Tensor:
    """Mean entropy of the most certain images, and KL(marginal || target), from logits (b, N).

    ``certain`` are the weights of :func:`certain_weights`.
    """
    log_p = logits.log_softmax(dim=-1)
    marginal = log_p.exp().mean(dim=0)
    log_ratio = marginal.clamp_min(1e-8).log() - target.clamp_min(1e-8).log()
    uncertain = (log_prob_entropy(log_p).sort().values * certain).sum()
    return uncertain + diversity * (marginal * log_ratio).sum()


def rate_decay(step: int, floor: float) -> float:
    """Learning rate of a step, 1 for the first, as a share of that of the first."""
    return max(floor, math.pow(step, -0.5))


def arrange(confidence: Tensor) -> Tensor:
    """The rows of a batch in an order that depends on its images, not on where they stand.

    A fixed permutation of the ranks of their confidence (b,): any stretch of it is a fair sample.
    """
    return confidence.argsort().index_select(0, _permutation(len(confidence), confidence.device))


@cache
def _permutation(count: int, device: torch.device) -> Tensor:
    """A fixed permutation; copied to the device once."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)


def ring(position: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Places (count,) of a ring buffer for the next values, and its position after them.

    Below ``size`` the position counts how many places are filled; above, it only says which one
    is next.
    """
    places = (position + torch.arange(count)) % size
    after = position + count
    return places, torch.where(after < 2 * size, after, after % size + size)
