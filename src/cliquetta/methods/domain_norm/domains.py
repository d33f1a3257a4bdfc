"""Encoding images, and assigning them to domains by their early features (Eq. 1 to 6)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.ring import write
from cliquetta.methods.domain_norm.run import Setup
from cliquetta.methods.domain_norm.state import GROUP, Key, Network, State, start_domain

YOUNG = 32  # images that a domain must have before others are distinguished from it
MIXED = 4  # images that a part of a mixed batch has at least


class Encoded(NamedTuple):
    """Some images, in the order of :func:`arrange`; with θ instead of θ₀, p replaces z."""

    hidden: Tensor  # h (b, T, D), at the input of the first adapted block
    signatures: Tensor  # s (b, F)
    features: Tensor  # f(h; θ₀) (b, E)
    zero_shot: Tensor  # z (b, N)
    rows: Tensor  # (b,) of each image in its batch

    def take(self, rows: Tensor) -> Encoded:
        """Select some of the images, and arrange these."""
        order = rows[arrange(self.zero_shot.amax(dim=1)[rows])]
        return Encoded(*(value.index_select(0, order) for value in self))

    def split(self, size: int) -> list[Encoded]:
        """Divide the images into stretches of at most ``size``; one of them is this itself."""
        if len(self.rows) <= size:
            return [self]
        return [Encoded(*p) for p in zip(*(torch.split(v, size) for v in self), strict=True)]


def encode(images: Tensor, theta: Tensor | None, network: Network) -> Encoded:
    """Encode images (b, 3, S, S), without ``theta`` by plain CLIP: Eq. 1, 2 and 3."""
    early = network.tower.run(network.tower.embed(images), 0, 1)
    hidden = network.tower.run(early, 1, network.start)
    signatures = signature(early, network.tower.config.class_tokens).to(network.theta.dtype)
    features = network.features(hidden, theta)
    rows = torch.arange(len(images), device=images.device)
    batch = Encoded(hidden, signatures, features, network.logits(features).softmax(dim=1), rows)
    return batch.take(rows)


def signature(early: Tensor, class_tokens: int = 1) -> Tensor:
    """Mean and deviation over patches (b, 2 D) of hidden states (b, T, D) after block 1, Eq. 2."""
    patches = early[:, class_tokens:].float()
    return torch.cat([patches.mean(dim=1), patches.std(dim=1)], dim=1)


def arrange(confidence: Tensor) -> Tensor:
    """Order images by their confidence (b,), so that any stretch is a fair sample, Eq. 3."""
    return confidence.argsort().index_select(0, _permutation(len(confidence), confidence.device))


@cache
def _permutation(count: int, device: torch.device) -> Tensor:
    """Draw a permutation that depends on nothing; it is copied to the device once."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)


def assign_domain(state: State, s: Tensor, setup: Setup) -> tuple[State, list[tuple[int, Tensor]]]:
    """Assign signatures s (b, F) to domains, known or new, Eq. 4 and 6; number and rows by part."""
    group, _ = write(state.group, signatures=s[:GROUP])
    state, parts = state._replace(group=group), []
    for known, rows in choose_domains(state, s, setup):
        used = [int(domain.last_used) for domain in state.domains]
        number = used.index(min(used)) if known is None else known
        domain, window = state.domains[number], state.window
        if known is None:
            domain = start_domain(setup.network, setup.config)
            numbers = window.domain.masked_fill(window.domain == number, -1)
            state = state._replace(window=window._replace(domain=numbers))
        key = merge_keys(domain.key, key_of(s if len(rows) == len(s) else s[rows]))
        domain = domain._replace(key=key, last_used=torch.tensor(max(used) + 1))
        state = state.with_domain(number, domain)
        parts.append((number, rows))
    largest = max(parts, key=lambda part: len(part[1]))[0]
    return state._replace(current=torch.tensor(largest)), parts


def choose_domains(state: State, s: Tensor, setup: Setup) -> list[tuple[int | None, Tensor]]:
    """Domain and rows of each part of a batch, Eq. 6; ``None`` for a domain that is new."""
    _, config, run = setup
    current, b, limit = int(state.current), len(s), config.domain_threshold
    rows = torch.arange(b, device=s.device)
    if config.domains == 1 or state.domains[current].images < YOUNG:
        return [(current, rows)]
    keys = tuple(domain.key for domain in state.domains)
    size, nearest = b, list[int]()
    if b < GROUP:
        group = state.group.signatures[: min(int(state.group.next), GROUP)]
        size, distance = len(group), run.read(distances(key_of(group), keys))
    else:
        figures = run.read(run(domain_figures, s, keys))
        nearest, distance = [int(domain) for domain in figures[:b]], figures[b:]
    numbers = [n for n in sorted(set(nearest)) if nearest.count(n) >= max(MIXED, b / 8)]
    if len(numbers) > 1:
        chosen = torch.tensor([n if n in numbers else -1 for n in nearest]).to(rows)
        near = {n: distances(key_of(s[chosen == n]), keys).tolist() for n in numbers}
        if all([m for m in numbers if near[n][m] <= limit] == [n] for n in numbers):
            chosen = chosen.masked_fill(chosen == -1, max(numbers, key=nearest.count))
            return [(n, rows[chosen == n]) for n in numbers]
    least = min(distance)
    return [(distance.index(least) if least <= limit * (1 + 3 / size) else None, rows)]


def domain_figures(signatures: Tensor, keys: tuple[Key, ...]) -> Tensor:
    """The domain nearest to each image alone, and the batch's distances, (b + K,)."""
    known = Key(*map(torch.stack, zip(*keys, strict=True)))
    variance = known.scatter / (known.images[:, None] - 1).clamp_min(1)
    squared = (signatures[:, None] - known.mean).square() / variance.clamp_min(1e-6)
    nearest = squared.mean(dim=2).masked_fill(known.images < 2, torch.inf).argmin(dim=1)
    distance = distances(key_of(signatures), keys)
    return torch.cat([nearest.to(distance.dtype), distance])


def distances(one: Key, keys: tuple[Key, ...]) -> Tensor:
    """Distance (K,) of a key from each of K others, Eq. 5; infinite from one without images."""
    others = Key(*map(torch.stack, zip(*keys, strict=True)))
    n, m = one.images, others.images[:, None]
    variance = (others.scatter + one.scatter) / (m + n - 2).clamp_min(1)
    squared = (one.mean - others.mean).square() / variance.clamp_min(1e-6)
    excess = squared - (1 / n + 1 / m.clamp_min(1))
    return excess.mean(dim=1).masked_fill(others.images == 0, torch.inf)


def key_of(signatures: Tensor) -> Key:
    """The key of images with signatures (b, F)."""
    mean = signatures.mean(dim=0)
    scatter = (signatures - mean).square().sum(dim=0)
    return Key(signatures.new_full((), len(signatures)), mean, scatter)  # no copy from the host


def merge_keys(one: Key, other: Key) -> Key:
    """The key of the images of both, Eq. 4."""
    n, m, step = one.images, other.images, other.mean - one.mean
    mean = one.mean + step * (m / (n + m))
    return Key(n + m, mean, one.scatter + other.scatter + step.square() * (n * m / (n + m)))
