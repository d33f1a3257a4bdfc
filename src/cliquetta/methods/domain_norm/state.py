"""What the method remembers: an immutable tree of tensors, and how it starts.

Symbols are those of docs/methods/domain_norm.md: N classes, features of E dimensions, signatures of
F. Counters that decide what is done next are on the CPU: reading them does not wait for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods._shared.adam import AdamState
from cliquetta.methods._shared.memory import NON_NEGATIVE, UNIT, Range
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.network import Network

GROUP = 16
"""Smaller batches are assigned to a domain together with the images before them."""
PER_CLASS = frozenset({"counts", "predicted", "voters"})
"""Fields of a domain that mean nothing for another class list."""


class Key(NamedTuple):
    """The signatures of a domain's images."""

    images: Tensor  # n
    mean: Tensor  # μ (F,)
    scatter: Tensor  # S (F,), summed squared deviations


class Counts(NamedTuple):
    """Sums over the zero-shot predictions z in a domain."""

    images: Tensor  # n
    confidence: Tensor  # Σ max z
    entropy: Tensor  # Σ H(z)
    agreement: Tensor  # Σ share of an image's neighbours with its zero-shot class
    classes: Tensor  # (N,) images by predicted class
    marginal: Tensor  # Σ z (N,)
    absence: Tensor  # A (N,), weights of the images in each class's background
    absent_logits: Tensor  # B (N,), sum of their logits by these weights
    debiased: Tensor  # Σ q (N,), predictions without background
    recent: Tensor  # the same, older images fading
    moments: Tensor  # M (4, N), of the logits of the images of the most predicted class


class Predicted(NamedTuple):
    """Recent images (N,) by predicted class, older ones fading: what shows a collapse."""

    adapted: Tensor
    zero_shot: Tensor


class Voters(NamedTuple):
    """The last V images of a domain, a ring buffer."""

    features: Tensor  # (V, E)
    predictions: Tensor  # (V, N)
    zero_shot: Tensor  # (V,) classes
    next: Tensor


class Progress(NamedTuple):
    """Counters of a domain."""

    images: Tensor
    due: Tensor  # images since the last step
    last_used: Tensor
    restarts: Tensor
    abstained: Tensor  # images that were left to zero-shot CLIP
    abstains: Tensor  # 1 if the last ones were


class Domain(NamedTuple):
    """One domain of the stream."""

    norms: AdamState  # θ (P,) with Adam's moments and number of steps
    key: Key
    counts: Counts
    predicted: Predicted
    voters: Voters
    progress: Progress


class Window(NamedTuple):
    """The last W images of the stream, which steps learn from: a ring buffer."""

    hidden: Tensor  # h (W, T, D)
    features: Tensor  # f(h; θ₀) (W, E)
    domain: Tensor  # (W,) number of each image's domain, -1 for none
    next: Tensor


class Group(NamedTuple):
    """The last signatures (16, F), by which a small batch is assigned: a ring buffer."""

    signatures: Tensor
    next: Tensor


class State(NamedTuple):
    """All that is remembered between batches."""

    current: Tensor  # number of the domain in use
    domains: tuple[Domain, ...]
    window: Window
    group: Group

    def with_domain(self, number: int, domain: Domain, window: Window) -> State:
        """The state with another domain in one place, and another window."""
        domains = (domain if k == number else one for k, one in enumerate(self.domains))
        return self._replace(domains=tuple(domains), window=window)


def ranges(domains: int, classes: int) -> dict[str, Range]:
    """What the tensors of a state can hold, by the endings of their paths."""
    sums = [f"counts.{name}" for name in Counts._fields if name not in ("absent_logits", "moments")]
    sums += [f"predicted.{name}" for name in Predicted._fields]
    return {
        **dict.fromkeys((*sums, "norms.second", "voters.predictions"), NON_NEGATIVE),
        **dict.fromkeys(("key.images", "key.scatter"), NON_NEGATIVE),
        **dict.fromkeys(("voters.features", "window.features"), UNIT),
        **dict.fromkeys(("current", "window.domain"), Range(below=domains)),
        "voters.zero_shot": Range(below=classes),
    }


def start_domain(network: Network, config: DomainNormConfig) -> Domain:
    """A domain without images."""
    theta, (N, E), V = network.theta, network.text.shape, config.vote_memory
    F, zero, count = 2 * network.tower.config.width, theta.new_zeros(()), torch.tensor(0)
    per_class = {name: theta.new_zeros(N) for name in Counts._fields}
    per_class |= dict.fromkeys(("images", "confidence", "entropy", "agreement"), zero)
    classes = torch.zeros(V, dtype=torch.long, device=theta.device)
    text = network.text
    return Domain(
        AdamState(theta, torch.zeros_like(theta), torch.zeros_like(theta), count),
        Key(zero, theta.new_zeros(F), theta.new_zeros(F)),
        Counts(**{**per_class, "moments": theta.new_zeros(4, N)}),
        Predicted(theta.new_zeros(N), theta.new_zeros(N)),
        Voters(text.new_zeros(V, E), text.new_zeros(V, N), classes, count),
        Progress(*(count for _ in Progress._fields)),
    )


def start_state(network: Network, config: DomainNormConfig) -> State:
    """Before the first batch."""
    tower, text, W, zero = network.tower.config, network.text, config.step_every, torch.tensor(0)
    shape = W, tower.class_tokens + tower.patches, tower.width
    hidden = torch.zeros(shape, dtype=network.dtype, device=text.device)
    window = Window(hidden, text.new_zeros(W, text.shape[1]), torch.full((W,), -1), zero)
    group = Group(network.theta.new_zeros(GROUP, 2 * tower.width), zero)
    return State(zero, (start_domain(network, config),) * config.domains, window, group)


def ring(position: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Slots (count,) of a ring buffer for the next values, and its position after them.

    Below ``size`` the position is the number of slots in use; above, it says which one is next.
    """
    slots, after = (position + torch.arange(count)) % size, position + count
    return slots, torch.where(after < 2 * size, after, after % size + size)
