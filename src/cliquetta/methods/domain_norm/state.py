"""What the method remembers: an immutable tree of tensors, and how each part starts.

Symbols are those of docs/methods/domain_norm.md. N classes, E dimensions of a feature, F of a
signature. Counters that decide what is done next are on the CPU, so that reading them does not wait
for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods._shared.adam import AdamState
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.network import Network

GROUP = 16
"""Smaller batches are assigned to a domain together with the images before them."""


class Key(NamedTuple):
    """Signatures of a domain: number of images n, mean μ (F,) and scatter S (F,)."""

    images: Tensor
    mean: Tensor
    scatter: Tensor


class Counts(NamedTuple):
    """Sums over the zero-shot predictions z in a domain."""

    images: Tensor
    """n."""
    classes: Tensor
    """Images (N,) by predicted class."""
    marginal: Tensor
    """Σ z (N,)."""
    confidence: Tensor
    """Σ max z."""
    entropy: Tensor
    """Σ H(z)."""
    absence: Tensor
    """A (N,): weights of the images in each class's background."""
    absent_logits: Tensor
    """B (N,): sum of the logits by these weights."""
    debiased: Tensor
    """Σ q (N,), q the predictions without background."""
    recent: Tensor
    """The same with older images fading."""
    agreement: Tensor
    """Σ share of an image's neighbours with its zero-shot class."""


class Predicted(NamedTuple):
    """Recent images (N,) by predicted class, older ones fading: what shows a collapse."""

    adapted: Tensor
    zero_shot: Tensor


class Voters(NamedTuple):
    """The last V images of a domain, a ring buffer."""

    features: Tensor
    """(V, E)."""
    predictions: Tensor
    """(V, N)."""
    zero_shot: Tensor
    """Zero-shot classes (V,)."""
    next: Tensor


class Progress(NamedTuple):
    """Counters of a domain."""

    images: Tensor
    due: Tensor
    """Images since the last step."""
    last_used: Tensor
    restarts: Tensor
    abstained: Tensor
    """Images predicted by zero-shot CLIP, because it knows nothing about them."""


class Domain(NamedTuple):
    """One domain of the stream."""

    norms: AdamState
    """θ, the LayerNorms of the adapted blocks, with Adam's moments and number of steps."""
    key: Key
    counts: Counts
    predicted: Predicted
    voters: Voters
    progress: Progress


class Window(NamedTuple):
    """The last images of the stream, which steps learn from: a ring buffer."""

    hidden: Tensor
    """Hidden states (W, T, D) at the input of the first adapted block."""
    features: Tensor
    """Features (W, E) of plain CLIP."""
    domain: Tensor
    """Number (W,) of each image's domain; -1 for none."""
    next: Tensor


class Group(NamedTuple):
    """The last signatures, by which a small batch is assigned: a ring buffer."""

    signatures: Tensor
    next: Tensor


class State(NamedTuple):
    """All that is remembered between batches."""

    current: Tensor
    """Number of the domain in use."""
    domains: tuple[Domain, ...]
    window: Window
    group: Group


PER_CLASS = frozenset({"counts", "predicted", "voters"})
"""Fields of a domain that mean nothing for another class list."""


def start_domain(network: Network, config: DomainNormConfig) -> Domain:
    """A domain without images."""
    theta, text, V = network.theta, network.text, config.vote_memory
    N, E = text.shape
    F = 2 * network.tower.config.width

    def zeros(*size: int) -> Tensor:
        return theta.new_zeros(size)

    def count() -> Tensor:
        return torch.zeros((), dtype=torch.long)

    counts = {name: zeros(N) for name in Counts._fields}
    for name in ("images", "confidence", "entropy", "agreement"):
        counts[name] = zeros()
    voted = torch.zeros(V, dtype=torch.long, device=text.device)
    return Domain(
        AdamState(theta, torch.zeros_like(theta), torch.zeros_like(theta), count()),
        Key(zeros(), zeros(F), zeros(F)),
        Counts(**counts),
        Predicted(zeros(N), zeros(N)),
        Voters(text.new_zeros(V, E), text.new_zeros(V, N), voted, count()),
        Progress(*(count() for _ in Progress._fields)),
    )


def start_state(network: Network, config: DomainNormConfig) -> State:
    """Before the first batch."""
    tower, text, W = network.tower.config, network.text, config.step_every
    tokens, zero = tower.class_tokens + tower.patches, torch.tensor(0)
    window = Window(
        torch.zeros(W, tokens, tower.width, dtype=network.dtype, device=text.device),
        text.new_zeros(W, text.shape[1]),
        torch.full((W,), -1),
        zero,
    )
    domains = (start_domain(network, config),) * config.domains
    return State(zero, domains, window, Group(text.new_zeros(GROUP, 2 * tower.width), zero))


def ring(position: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Slots (count,) of a ring buffer for the next values, and its position after them.

    Below ``size`` the position is the number of slots in use; above, it only says which one is
    next.
    """
    slots = (position + torch.arange(count)) % size
    after = position + count
    return slots, torch.where(after < 2 * size, after, after % size + size)
