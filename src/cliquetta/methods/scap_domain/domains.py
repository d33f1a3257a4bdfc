"""Telling domains apart by early features: the keys under which they are retained.

What a shift does to images (noise, blur, ink on paper) shows in the first block already, where
the classes hardly show yet. A domain's key is the running mean and scatter, over its images, of
each channel's mean and deviation over patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIXED = 4
"""Images that a part of a mixed batch holds at least."""


@dataclass(frozen=True)
class DomainKeys:
    """Keys of K domains: images seen (K,), means (K, F) and summed squared deviations (K, F)."""

    count: Tensor
    mean: Tensor
    scatter: Tensor


def signature(early: Tensor, class_tokens: int = 1) -> Tensor:
    """Mean and deviation over patches (B, 2 D) of early hidden states (B, T, D)."""
    patches = early[:, class_tokens:].float()
    return torch.cat([patches.mean(dim=1), patches.std(dim=1)], dim=1)


def domain_distance(signatures: Tensor, keys: DomainKeys) -> Tensor:
    """How far the batch (b, F) lies from each domain, (K,).

    Squared difference of the means in units of the images' own variance (Cohen's d squared), less
    what two samples of one domain differ by, averaged over channels: near 0 within a domain,
    whatever the sizes. A domain without images is infinitely far.
    """
    return key_distance(_key_of(signatures), keys)


def key_distance(one: DomainKeys, keys: DomainKeys) -> Tensor:
    """How far a domain lies from each of K others, (K,); see :func:`domain_distance`."""
    b, count = one.count[:, None], keys.count[:, None]
    variance = (keys.scatter + one.scatter) / (count + b - 2).clamp_min(1)
    squared = (one.mean - keys.mean).square() / variance.clamp_min(1e-6)
    excess = squared - (1 / b + 1 / count.clamp_min(1))
    return excess.mean(dim=1).masked_fill(keys.count == 0, torch.inf)


def _key_of(signatures: Tensor) -> DomainKeys:
    """The key of a batch (b, F), as of one domain."""
    centre = signatures.mean(dim=0, keepdim=True)
    own = (signatures - centre).square().sum(dim=0, keepdim=True)
    return DomainKeys(signatures.new_tensor([len(signatures)]), centre, own)


def absorb(signatures: Tensor, keys: DomainKeys) -> DomainKeys:
    """The keys with the batch (b, F) counted into every domain."""
    return merge_keys(keys, _key_of(signatures))


def merge_keys(keys: DomainKeys, one: DomainKeys) -> DomainKeys:
    """The keys with the images of another domain counted into every one (Chan's update)."""
    b, count = one.count[:, None], keys.count[:, None]
    step = one.mean - keys.mean
    return DomainKeys(
        keys.count + one.count,
        keys.mean + step * (b / (count + b)),
        keys.scatter + one.scatter + step.square() * (count * b / (count + b)),
    )


def nearest_domains(signatures: Tensor, keys: DomainKeys) -> Tensor:
    """The domain (b,) that each image lies nearest to, by itself."""
    variance = keys.scatter / (keys.count[:, None] - 1).clamp_min(1)
    difference = signatures[:, None] - keys.mean
    squared = (difference.square() / variance.clamp_min(1e-6)).mean(dim=2)
    return squared.masked_fill(keys.count < 2, torch.inf).argmin(dim=1)


def nearest_domain(signatures: Tensor, keys: DomainKeys, threshold: float) -> int | None:
    """The domain that images lie nearest to as a group, or ``None`` if that lies too far."""
    distance = domain_distance(signatures, keys)
    # The mean of a small group strays far by chance: it must lie farther off to be new.
    known = float(distance.min()) <= threshold * (1 + 3 / len(signatures))
    return int(distance.argmin()) if known else None


def split_domains(
    signatures: Tensor, keys: DomainKeys, threshold: float
) -> list[tuple[int | None, Tensor]]:
    """Domain and rows of the parts of a batch; ``None`` for a domain that is not known yet.

    Mostly one part: the whole batch belongs to the domain that lies nearest, if it lies within
    ``threshold``. Only where images choose between known domains, and their parts lie as far
    apart as two domains do, is a batch split.
    """
    chosen = nearest_domains(signatures, keys)
    choices = chosen.tolist()
    rows = torch.arange(len(signatures), device=signatures.device)
    least = max(MIXED, len(signatures) / 8)
    parts = [domain for domain in sorted(set(choices)) if choices.count(domain) >= least]
    if len(parts) > 1 and _apart(signatures, chosen, parts, keys, threshold):
        strays = ~torch.isin(chosen, torch.tensor(parts, device=chosen.device))
        chosen = chosen.masked_fill(strays, max(parts, key=choices.count))
        return [(domain, rows[chosen == domain]) for domain in parts]
    return [(nearest_domain(signatures, keys, threshold), rows)]


def _apart(
    signatures: Tensor, chosen: Tensor, parts: list[int], keys: DomainKeys, threshold: float
) -> bool:
    """Whether every part lies near its own domain and far from those of the other parts."""
    for domain in parts:
        distance = domain_distance(signatures[chosen == domain], keys)
        if float(distance[domain]) > threshold:
            return False
        if any(float(distance[other]) <= threshold for other in parts if other != domain):
            return False
    return True
