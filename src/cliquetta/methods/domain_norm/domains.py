"""Assigning images to domains by early features (Eq. 4 to 6).

A domain is known by the mean and scatter of the signatures of its images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cliquetta.methods.building.ring import write
from cliquetta.methods.domain_norm.run import Setup
from cliquetta.methods.domain_norm.state import GROUP, Key, State, start_domain

YOUNG = 32  # images that a domain must have before others are distinguished from it
MIXED = 4  # images that a part of a mixed batch has at least


def assign_domain(
    state: State, signatures: Tensor, setup: Setup
) -> tuple[State, list[tuple[int, Tensor]]]:
    """Assign a batch with signatures (b, F) to domains, Eq. 6; their keys take it up, Eq. 4.

    Also the domain and the rows of each part of the batch. One that is far from all domains opens
    a new one in place of the least recently used.
    """
    group, _ = write(state.group, signatures=signatures[:GROUP])
    state, parts = state._replace(group=group), []
    for known, rows in choose_domains(state, signatures, setup):
        used = [int(domain.last_used) for domain in state.domains]
        number = used.index(min(used)) if known is None else known
        domain, window = state.domains[number], state.window
        if known is None:
            domain = start_domain(setup.network, setup.config)
            numbers = window.domain.masked_fill(window.domain == number, -1)
            window = window._replace(domain=numbers)
        part = signatures if len(rows) == len(signatures) else signatures[rows]
        key = merge_keys(domain.key, key_of(part))
        domain = domain._replace(key=key, last_used=torch.tensor(max(used) + 1))
        state = state.with_domain(number, domain, window)
        parts.append((number, rows))
    largest = max(parts, key=lambda part: len(part[1]))[0]
    return state._replace(current=torch.tensor(largest)), parts


def choose_domains(
    state: State, signatures: Tensor, setup: Setup
) -> list[tuple[int | None, Tensor]]:
    """Domain and rows of each part of a batch, Eq. 6; ``None`` for a domain that is new."""
    _, config, run = setup
    current, b, limit = int(state.current), len(signatures), config.domain_threshold
    rows = torch.arange(b, device=signatures.device)
    if config.domains == 1 or state.domains[current].images < YOUNG:
        return [(current, rows)]
    keys = tuple(domain.key for domain in state.domains)
    size, nearest = b, list[int]()
    if b < GROUP:
        group = state.group.signatures[: min(int(state.group.next), GROUP)]
        size, distance = len(group), run.read(distances(key_of(group), keys))
    else:
        figures = run.read(run(domain_figures, signatures, keys))
        nearest, distance = [int(domain) for domain in figures[:b]], figures[b:]
    numbers = [n for n in sorted(set(nearest)) if nearest.count(n) >= max(MIXED, b / 8)]
    chosen = torch.tensor([n if n in numbers else -1 for n in nearest])
    if len(numbers) > 1 and are_apart(signatures, chosen.to(rows), numbers, keys, limit):
        chosen = chosen.masked_fill(chosen == -1, max(numbers, key=nearest.count)).to(rows)
        return [(number, rows[chosen == number]) for number in numbers]
    least = min(distance)
    return [(distance.index(least) if least <= limit * (1 + 3 / size) else None, rows)]


def are_apart(
    signatures: Tensor, chosen: Tensor, numbers: list[int], keys: tuple[Key, ...], threshold: float
) -> bool:
    """Whether every part is near its own domain and far from those of the other parts."""
    for number in numbers:
        distance = distances(key_of(signatures[chosen == number]), keys).tolist()
        if [other for other in numbers if distance[other] <= threshold] != [number]:
            return False
    return True


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
    return Key(
        n + m,
        one.mean + step * (m / (n + m)),
        one.scatter + other.scatter + step.square() * (n * m / (n + m)),
    )
