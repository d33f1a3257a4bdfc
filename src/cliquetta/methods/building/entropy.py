"""Entropies in nats: of logits, of (log-)probabilities, and of the mean of several predictions."""

import math

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Entropy (...) of softmax(logits) over the last dimension."""
    return log_prob_entropy(logits.log_softmax(dim=-1))


def log_prob_entropy(log_p: Tensor) -> Tensor:
    """Entropy (...) of log-probabilities (..., N)."""
    return -(log_p.exp() * log_p).sum(dim=-1)


def prob_entropy(p: Tensor) -> Tensor:
    """Entropy (...) of probabilities (..., N), which may be zero."""
    return log_prob_entropy(p.clamp_min(1e-8).log())


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy (...) of the mean of softmax(logits) over the views of logits (..., K, N)."""
    # by logsumexp and a clamp, so that a class without mass adds zero and no gradient
    # becomes NaN
    log_p = logits.log_softmax(dim=-1).logsumexp(dim=-2) - math.log(logits.shape[-2])
    return log_prob_entropy(log_p.clamp(min=torch.finfo(log_p.dtype).min))
