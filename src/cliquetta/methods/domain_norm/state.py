"""CLIP as a function of its later LayerNorms; what is remembered, an immutable tree of tensors.

Counters that decide what is done next are on the CPU: reading them does not wait for a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.adam import AdamState
from cliquetta.methods.building.layernorm import LateBlocks, LayerNormTower
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.model.clip import CLIP, l2_normalize
from cliquetta.prompts.classes import ClassPrompts

GROUP = 16  # images by which a smaller batch is assigned to a domain


class Network:
    """The towers: images to hidden states h, these to features f(h; θ), these to probabilities."""

    def __init__(self, model: CLIP, prompts: ClassPrompts, config: DomainNormConfig) -> None:
        self.tower, self.dtype = model.require_vit(), model.dtype
        self.text, self.scale = model.classifier(prompts), model.scale
        blocks = len(self.tower.blocks)
        self.start = min(max(1, int(blocks * config.shared_depth)), blocks - 1)  # first adapted
        self.late = LayerNormTower(LateBlocks(self.tower, self.start), precise=False)
        self.theta = self.late.start  # θ₀ (P,): gains and biases as loaded

    def features(self, hidden: Tensor, theta: Tensor | None = None) -> Tensor:
        """Compute unit features f(h; θ) (b, E) of hidden states (b, T, D); f(h; θ₀) by default."""
        if theta is None:
            return l2_normalize(self.tower.pool(self.tower.run(hidden, self.start)))
        return l2_normalize(self.late(theta, hidden))

    def logits(self, features: Tensor) -> Tensor:
        """Compute scaled cosines (b, N) of features and class texts, Eq. 1."""
        return self.scale * features @ self.text.T


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
    asked: Tensor  # images whose neighbours were
    classes: Tensor  # (N,) images by predicted class
    marginal: Tensor  # Σ z (N,)
    absence: Tensor  # A (N,), weights of the images in each class's background
    absent_logits: Tensor  # B (N,), sum of their logits by these weights
    debiased: Tensor  # Σ q (N,), predictions without background
    recent: Tensor  # R (N,), the same, older images fading
    moments: Tensor  # M (4, N), of the logits of the images of the most predicted class
    predicted: Tensor  # (2, N) recent images by class of p and of z, older ones fading


class Voters(NamedTuple):
    """The last V images of a domain, a ring buffer."""

    features: Tensor  # (V, E)
    predictions: Tensor  # (V, N)
    zero_shot: Tensor  # (V,) classes
    next: Tensor


class Domain(NamedTuple):
    """One domain of the stream."""

    norms: AdamState  # θ (P,) with Adam's moments and number of steps
    key: Key
    counts: Counts
    voters: Voters
    images: Tensor  # all that came
    due: Tensor  # those since the last step
    last_used: Tensor
    restarts: Tensor
    abstained: Tensor  # images that were left to zero-shot CLIP
    abstains: Tensor  # 1 if the last ones were


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

    def with_domain(self, number: int, domain: Domain) -> State:
        """Replace one domain."""
        domains = (domain if k == number else one for k, one in enumerate(self.domains))
        return self._replace(domains=tuple(domains))


def start_domain(network: Network, config: DomainNormConfig) -> Domain:
    """A domain without images."""
    theta, text, (N, E), V = network.theta, network.text, network.text.shape, config.vote_memory
    zero, many, count = theta.new_zeros(()), theta.new_zeros(N), torch.tensor(0)
    shaped = {"moments": theta.new_zeros(4, N), "predicted": theta.new_zeros(2, N)}
    single = dict.fromkeys(("images", "confidence", "entropy", "agreement", "asked"), zero)
    signature = theta.new_zeros(2 * network.tower.config.width)
    classes = torch.zeros(V, dtype=torch.long, device=theta.device)
    return Domain(
        AdamState(theta, torch.zeros_like(theta), torch.zeros_like(theta), count),
        Key(zero, signature, signature),
        Counts(**{**dict.fromkeys(Counts._fields, many), **single, **shaped}),
        Voters(text.new_zeros(V, E), text.new_zeros(V, N), classes, count),
        *[count] * 6,
    )


def start_state(network: Network, config: DomainNormConfig) -> State:
    """Before the first batch."""
    tower, text, W, zero = network.tower.config, network.text, config.step_every, torch.tensor(0)
    shape = W, tower.class_tokens + tower.patches, tower.width
    hidden = torch.zeros(shape, dtype=network.dtype, device=text.device)
    window = Window(hidden, text.new_zeros(W, text.shape[1]), torch.full((W,), -1), zero)
    group = Group(network.theta.new_zeros(GROUP, 2 * tower.width), zero)
    return State(zero, (start_domain(network, config),) * config.domains, window, group)
