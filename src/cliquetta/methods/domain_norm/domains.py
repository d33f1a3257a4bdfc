"""Encoding images, and assigning a batch to a domain by their early features (Eq. 1 to 4)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.state import GROUP, Key, Network, State, start_domain

YOUNG = 32
"""Images that the domain in use must have before others are distinguished from it."""


class Encoded(NamedTuple):
    """Some images, in the order of :func:`arrange`."""

    hidden: Tensor  # h (b, T, D)
    signatures: Tensor  # s (b, F)
    features: Tensor  # f (b, E)
    probabilities: Tensor  # (b, N): z with θ₀, p with another θ
    rows: Tensor  # (b,) of each image in its batch

    def take(self, rows: Tensor) -> Encoded:
        """Select some of the images, and arrange these."""
        confidence = self.probabilities.amax(dim=1)
        arranged = arrange(confidence[rows])
        order = rows[arranged]
        columns = [value.index_select(0, order) for value in self]
        return Encoded._make(columns)

    def stretches(self, size: int) -> list[Encoded]:
        """Divide the images into stretches of at most ``size``."""
        if len(self.rows) <= size:
            return [self]
        columns = [torch.split(value, size) for value in self]
        return [Encoded._make(parts) for parts in zip(*columns, strict=True)]


def encode(
    images: Tensor, theta: Tensor | None, temperature: Tensor | None, network: Network
) -> Encoded:
    """Encode images (b, 3, S, S) by plain CLIP, or with LayerNorms θ at a temperature, Eq. 1, 2."""
    hidden = network.hidden(images)
    features = network.features(hidden, theta)
    logits = network.logits(features)
    if temperature is not None:
        logits = logits / temperature
    rows = torch.arange(len(images), device=images.device)
    batch = Encoded(
        hidden=hidden,
        signatures=signature(hidden, network.tower.config.class_tokens).to(
            network.theta.dtype
        ),
        features=features,
        probabilities=logits.softmax(dim=1),
        rows=rows,
    )
    return batch.take(rows)


def signature(hidden: Tensor, class_tokens: int = 1) -> Tensor:
    """Compute mean and deviation over patches, s (b, 2 D), of hidden states (b, T, D), Eq. 2."""
    patches = hidden[:, class_tokens:].float()
    return torch.cat([patches.mean(dim=1), patches.std(dim=1)], dim=1)


def arrange(confidence: Tensor) -> Tensor:
    """Order images by their confidence (b,) and permute, so that any stretch is a fair sample."""
    permutation = _permutation(len(confidence), confidence.device)
    return confidence.argsort().index_select(0, permutation)


@cache
def _permutation(count: int, device: torch.device) -> Tensor:
    """Draw a permutation that depends on nothing; it is copied to the device once."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)


def judged_signatures(group: Tensor, signatures: Tensor) -> Tensor:
    """Choose the signatures that decide on the domain: the batch, or the last 16 if it is small."""
    if len(signatures) >= GROUP:
        return signatures
    return torch.cat([group, signatures])[-GROUP:]


def assign_domain(
    state: State,
    batch: Encoded,
    distances: list[float],
    network: Network,
    config: DomainNormConfig,
) -> State:
    """Assign a batch to a known domain or a new one, and update the domain's key, Eq. 3 and 4."""
    signatures = batch.signatures
    number = choose_domain(state, len(signatures), distances, config)
    last_used = [int(domain.last_used) for domain in state.domains]

    # The least recently used domain makes room, and its images leave the window.
    if number is None:
        number = last_used.index(min(last_used))
        window = state.window
        left = window.domain.masked_fill(window.domain == number, -1)
        state = state._replace(window=window._replace(domain=left))
        state = state.with_domain(number, start_domain(network))

    # The domain's key counts this batch, too.
    domain = state.domains[number]
    domain = domain._replace(
        key=merge_keys(domain.key, key_of(signatures)),
        last_used=torch.tensor(max(last_used) + 1),
    )
    group = torch.cat([state.group, signatures[:GROUP]])[-GROUP:]
    state = state._replace(current=torch.tensor(number), group=group)
    return state.with_domain(number, domain)


def choose_domain(
    state: State, images: int, distances: list[float], config: DomainNormConfig
) -> int | None:
    """Choose the number of a batch's domain by its distances, ``None`` for a new one, Eq. 4."""
    # A young domain has seen too little for others to be told from it.
    if config.domains == 1 or state.in_use().images < YOUNG:
        return int(state.current)

    # Fewer images differ by more from their own domain.
    judged = max(images, GROUP)
    limit = config.domain_threshold * (1 + 3 / judged)
    nearest = min(distances)
    return distances.index(nearest) if nearest <= limit else None


def key_distances(one: Key, keys: tuple[Key, ...]) -> Tensor:
    """Compute the distance d (K,) of a key from each of K others, Eq. 3; infinite if empty."""
    # m images of the one, n (K, 1) of each other.
    m = one.images
    images = torch.stack([key.images for key in keys])  # (K,)
    mean = torch.stack([key.mean for key in keys])  # (K, F)
    scatter = torch.stack([key.scatter for key in keys])  # (K, F)
    n = images[:, None]

    # Cohen's d squared per channel, less what two samples of one domain differ by.
    freedom = (n + m - 2).clamp_min(1)
    variance = (scatter + one.scatter) / freedom
    difference = one.mean - mean
    squared = difference.square() / variance.clamp_min(1e-6)
    by_chance = 1 / m + 1 / n.clamp_min(1)
    distance = (squared - by_chance).mean(dim=1)
    return distance.masked_fill(images == 0, torch.inf)


def key_of(signatures: Tensor) -> Key:
    """Compute the key of images with signatures (b, F)."""
    mean = signatures.mean(dim=0)
    return Key(
        images=signatures.new_full((), len(signatures)),  # no copy from the host
        mean=mean,
        scatter=(signatures - mean).square().sum(dim=0),
    )


def merge_keys(one: Key, other: Key) -> Key:
    """Compute the key of the images of both."""
    images = one.images + other.images
    step = other.mean - one.mean
    between = step.square() * (one.images * other.images / images)
    return Key(
        images=images,
        mean=one.mean + step * (other.images / images),
        scatter=one.scatter + other.scatter + between,
    )
