"""Telling domains apart by early features: the keys under which domain prompts are retained.

What a shift does to pictures (noise, blur, ink on paper) shows in the first block already, where
the classes hardly show yet. A domain's key is the running mean and scatter, over its images, of
each channel's mean and deviation over patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DomainKeys:
    """Keys of K domains: images seen (K,), means (K, F) and summed squared deviations (K, F)."""

    count: Tensor
    mean: Tensor
    scatter: Tensor


def signature(early: Tensor) -> Tensor:
    """Mean and deviation over patches (B, 2 D) of early hidden states (B, 1 + T, D)."""
    patches = early[:, 1:].float()
    return torch.cat([patches.mean(dim=1), patches.std(dim=1)], dim=1)


def domain_distance(signatures: Tensor, keys: DomainKeys) -> Tensor:
    """How far the batch (b, F) lies from each domain, (K,).

    Squared difference of the means in units of the images' own variance (Cohen's d squared), less
    what two samples of one domain differ by, averaged over channels: near 0 within a domain,
    whatever the sizes. A domain without images is infinitely far.
    """
    b, count = len(signatures), keys.count[:, None]
    centre = signatures.mean(dim=0)
    own = (signatures - centre).square().sum(dim=0)
    variance = (keys.scatter + own) / (count + b - 2).clamp_min(1)
    squared = (centre - keys.mean).square() / variance.clamp_min(1e-6)
    excess = squared - (1 / b + 1 / count.clamp_min(1))
    return excess.mean(dim=1).masked_fill(keys.count == 0, torch.inf)


def absorb(signatures: Tensor, keys: DomainKeys) -> DomainKeys:
    """The keys with the batch (b, F) counted into every domain (Chan's pairwise update)."""
    b, count = len(signatures), keys.count[:, None]
    centre = signatures.mean(dim=0)
    step = centre - keys.mean
    own = (signatures - centre).square().sum(dim=0)
    return DomainKeys(
        keys.count + b,
        keys.mean + step * (b / (count + b)),
        keys.scatter + own + step.square() * (count * b / (count + b)),
    )
