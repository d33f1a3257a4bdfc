"""CLIP as a function of its LayerNorms, and what is remembered between batches.

The state is an immutable tree of tensors. Counters that decide what is done next are on
the CPU: reading them does not wait for a GPU.
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

GROUP = 16
"""Images that a batch is assigned to a domain by, if it is smaller itself."""


class Network:
    """The image tower in two parts (its first block, and the others) and the class texts."""

    def __init__(self, model: CLIP, prompts: ClassPrompts) -> None:
        self.tower = model.require_vit()
        self.dtype = model.dtype
        self.text = model.classifier(prompts)  # T (N, E)
        self.scale = model.scale  # τ

        # The first adapted block, and the blocks from it on as a function of θ.
        last_block = len(self.tower.blocks) - 1
        self.start = min(1, last_block)
        late_blocks = LateBlocks(self.tower, self.start)
        self.late = LayerNormTower(late_blocks, precise=False)
        self.theta = self.late.start  # θ₀ (P,): gains and biases as loaded

    def hidden(self, images: Tensor) -> Tensor:
        """Compute hidden states h (b, T, D) of images (b, 3, S, S) at the first adapted block."""
        return self.tower.run(self.tower.embed(images), 0, self.start)

    def features(self, hidden: Tensor, theta: Tensor | None = None) -> Tensor:
        """Compute unit features f(h; θ) (b, E) of hidden states (b, T, D); f(h; θ₀) by default."""
        if theta is not None:
            return l2_normalize(self.late(theta, hidden))
        last = self.tower.run(hidden, self.start)
        return l2_normalize(self.tower.pool(last))

    def logits(self, features: Tensor) -> Tensor:
        """Compute scaled cosines τ T f (b, N) of features (b, E) and class texts."""
        return self.scale * features @ self.text.T


class Key(NamedTuple):
    """Number, mean and scatter of the signatures of some images."""

    images: Tensor  # n
    mean: Tensor  # μ (F,)
    scatter: Tensor  # S (F,), summed squared deviations


class Counts(NamedTuple):
    """Sums over the zero-shot predictions z of a domain."""

    images: Tensor  # n
    confidence: Tensor  # Σ max z
    marginal: Tensor  # Σ z (N,)
    classes: Tensor  # (N,) images by predicted class
    moments: Tensor  # (4, N), of the logits of images of the most predicted class
    absence: Tensor  # A (N,), weights of the images in each class's background
    absent_logits: Tensor  # B (N,), sum of their logits by these weights
    debiased: Tensor  # C = Σ q (N,), predictions without background
    concentration: Tensor  # Σ |q|², 1 per image if predictions were certain
    recent: Tensor  # R (N,), sum of q that fades with every image
    recent_concentration: Tensor  # sum of |q|² that fades alike


class Domain(NamedTuple):
    """One domain of the stream."""

    norms: AdamState  # θ (P,) with Adam's moments and number of steps
    temperature: Tensor  # of Eq. 13
    key: Key
    counts: Counts
    images: Tensor  # all that came
    due: Tensor  # those since the last step fell due
    last_used: Tensor


class Window(NamedTuple):
    """The last W images that steps may learn from, a ring buffer; none from between steps."""

    hidden: Tensor  # h (W, T, D)
    features: Tensor  # f(h; θ₀) (W, E)
    domain: Tensor  # (W,) number of each image's domain, -1 for none
    next: Tensor


class State(NamedTuple):
    """All that is remembered between batches."""

    current: Tensor  # number of the domain in use
    domains: tuple[Domain, ...]
    window: Window
    group: Tensor  # (16, F), the last signatures; the first 16 of a larger batch

    def in_use(self) -> Domain:
        """Look up the domain in use."""
        return self.domains[int(self.current)]

    def with_domain(self, number: int, domain: Domain) -> State:
        """Replace one domain."""
        domains = list(self.domains)
        domains[number] = domain
        return self._replace(domains=tuple(domains))


def start_domain(network: Network) -> Domain:
    """Make a domain without images."""
    zero = network.theta.new_zeros(())
    per_class = network.theta.new_zeros(len(network.text))
    signature = network.theta.new_zeros(2 * network.tower.config.width)
    counts = Counts(
        images=zero,
        confidence=zero,
        marginal=per_class,
        classes=per_class,
        moments=network.theta.new_zeros(4, len(network.text)),
        absence=per_class,
        absent_logits=per_class,
        debiased=per_class,
        concentration=zero,
        recent=per_class,
        recent_concentration=zero,
    )
    norms = AdamState(
        values=network.theta,
        first=torch.zeros_like(network.theta),
        second=torch.zeros_like(network.theta),
        steps=torch.tensor(0),
    )
    return Domain(
        norms=norms,
        temperature=torch.ones_like(zero),
        key=Key(images=zero, mean=signature, scatter=signature),
        counts=counts,
        images=torch.tensor(0),
        due=torch.tensor(0),
        last_used=torch.tensor(0),
    )


def start_state(network: Network, config: DomainNormConfig) -> State:
    """Make the state before the first batch."""
    tower = network.tower.config
    tokens = tower.class_tokens + tower.patches
    shape = (config.window, tokens, tower.width)
    window = Window(
        hidden=torch.zeros(shape, dtype=network.dtype, device=network.text.device),
        features=network.text.new_zeros(config.window, network.text.shape[1]),
        domain=torch.full((config.window,), -1),
        next=torch.tensor(0),
    )
    return State(
        current=torch.tensor(0),
        domains=(start_domain(network),) * config.domains,
        window=window,
        group=network.theta.new_zeros(GROUP, 2 * tower.width),
    )
