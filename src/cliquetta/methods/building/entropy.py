"""Entropies in nats: of logits, (log-)probabilities and mean predictions."""

import math

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Compute the entropy (...) of softmax(logits) over the last dimension."""
    return log_prob_entropy(logits.log_softmax(dim=-1))


def log_prob_entropy(log_p: Tensor) -> Tensor:
    """Compute the entropy (...) of log-probabilities (..., N)."""
    return -(log_p.exp() * log_p).sum(dim=-1)


def prob_entropy(p: Tensor) -> Tensor:
    """Compute the entropy (...) of probabilities (..., N), which may be zero."""
    return log_prob_entropy(p.clamp_min(1e-8).log())


def marginal_entropy(logits: Tensor) -> Tensor:
    """Compute the entropy (...) of the mean over views of logits (..., K, N)."""
    # By logsumexp and a clamp, so that a class without mass adds zero and no gradient
    # becomes NaN.
    views = logits.shape[-2]
    by_view = logits.log_softmax(dim=-1)
    log_sum = by_view.logsumexp(dim=-2)
    log_p = log_sum - math.log(views)

    least = torch.finfo(log_p.dtype).min
    log_p = log_p.clamp(min=least)
    return log_prob_entropy(log_p)
