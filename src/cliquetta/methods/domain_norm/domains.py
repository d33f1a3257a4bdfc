"""Telling domains apart by early features: the keys under which they are retained.

What a shift does to images (noise, blur, ink on paper) shows in the first block already, where
the classes hardly show yet. A domain's key is the running mean and scatter, over its images, of
each channel's mean and deviation over patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

KEYS = ("key_count", "key_mean", "key_scatter")
"""What :class:`DomainKeys` are called in the adapter's memory."""
GROUP = 16
"""Smaller batches are told apart together with the images before them: single images stray."""
MIXED = 4
"""Images that a part of a mixed batch holds at least."""


class DomainKeys(NamedTuple):
    """Keys of K domains: images seen (K,), means (K, F) and summed squared deviations (K, F)."""

    images: Tensor
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
    b, count = one.images[:, None], keys.images[:, None]
    variance = (keys.scatter + one.scatter) / (count + b - 2).clamp_min(1)
    squared = (one.mean - keys.mean).square() / variance.clamp_min(1e-6)
    excess = squared - (1 / b + 1 / count.clamp_min(1))
    return excess.mean(dim=1).masked_fill(keys.images == 0, torch.inf)


def _key_of(signatures: Tensor) -> DomainKeys:
    """The key of a batch (b, F), as of one domain."""
    centre = signatures.mean(dim=0, keepdim=True)
    own = (signatures - centre).square().sum(dim=0, keepdim=True)
    count = signatures.new_full((1,), len(signatures))  # no copy from the host
    return DomainKeys(count, centre, own)


def absorb(signatures: Tensor, keys: DomainKeys) -> DomainKeys:
    """The keys with the batch (b, F) counted into every domain."""
    return merge_keys(keys, _key_of(signatures))


def merge_keys(keys: DomainKeys, one: DomainKeys) -> DomainKeys:
    """The keys with the images of another domain counted into every one (Chan's update)."""
    b, count = one.images[:, None], keys.images[:, None]
    step = one.mean - keys.mean
    return DomainKeys(
        keys.images + one.images,
        keys.mean + step * (b / (count + b)),
        keys.scatter + one.scatter + step.square() * (count * b / (count + b)),
    )


def nearest_domains(signatures: Tensor, keys: DomainKeys) -> Tensor:
    """The domain (b,) that each image lies nearest to, by itself."""
    variance = keys.scatter / (keys.images[:, None] - 1).clamp_min(1)
    difference = signatures[:, None] - keys.mean
    squared = (difference.square() / variance.clamp_min(1e-6)).mean(dim=2)
    return squared.masked_fill(keys.images < 2, torch.inf).argmin(dim=1)


def batch_figures(signatures: Tensor, keys: DomainKeys) -> Tensor:
    """What :func:`split_domains` decides by: nearest domain of each image and distances, (b + K,).

    Computed in one go, so that the host waits for the device once.
    """
    nearest, distance = nearest_domains(signatures, keys), domain_distance(signatures, keys)
    return torch.cat([nearest.to(distance.dtype), distance])


def nearest_domain(distance: Sequence[float], size: int, threshold: float) -> int | None:
    """The domain that a group of images lies nearest to, or ``None`` if that lies too far.

    ``distance`` are those of :func:`domain_distance` for a group of ``size`` images.
    """
    least = min(distance)
    # The mean of a small group strays far by chance: it must lie farther off to be new.
    return distance.index(least) if least <= threshold * (1 + 3 / size) else None


def split_domains(
    signatures: Tensor, keys: DomainKeys, threshold: float, figures: Sequence[float]
) -> list[tuple[int | None, Tensor]]:
    """Domain and rows of the parts of a batch; ``None`` for a domain that is not known yet.

    Mostly one part: the whole batch belongs to the domain that lies nearest, if it lies within
    ``threshold``. Only where images choose between known domains, and their parts lie as far
    apart as two domains do, is a batch split. ``figures`` are those of :func:`batch_figures`.
    """
    b = len(signatures)
    choices, distance = [int(domain) for domain in figures[:b]], figures[b:]
    rows = torch.arange(b, device=signatures.device)
    least = max(MIXED, b / 8)
    parts = [domain for domain in sorted(set(choices)) if choices.count(domain) >= least]
    if len(parts) > 1:
        chosen = torch.tensor(choices, device=signatures.device)
        if _apart(signatures, chosen, parts, keys, threshold):
            strays = ~torch.isin(chosen, torch.tensor(parts, device=chosen.device))
            chosen = chosen.masked_fill(strays, max(parts, key=choices.count))
            return [(domain, rows[chosen == domain]) for domain in parts]
    return [(nearest_domain(distance, b, threshold), rows)]


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
