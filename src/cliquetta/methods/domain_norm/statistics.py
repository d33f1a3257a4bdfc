"""What the answers of a domain say about it: counted per domain in the adapter's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods._shared.entropy import log_prob_entropy
from cliquetta.methods._shared.memory import Memory
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.frequencies import (
    belief,
    burst,
    class_frequencies,
    class_prior,
    class_weights,
    count_answers,
    evenness,
    mix_frequencies,
    plain_share,
    remove_background,
)

TOLD_FROM = 64
"""Images of a domain from which the information of its answers is told."""
COLLAPSED, DIVERSE, WATCHED = 0.95, 0.5, 128
"""Adaptation has collapsed if one class takes more than the first share of the recent answers of at
least the third number of images, and less than the second share of zero-shot CLIP's."""


class Counts(NamedTuple):
    """What is counted of the zero-shot answers in a domain; names of the adapter's memory."""

    counted: Tensor
    """Images."""
    answers: Tensor
    """(N,): how often each class was the answer."""
    class_mass: Tensor
    """(N,): summed probabilities."""
    confidence: Tensor
    """Summed probabilities of the answers."""
    entropy: Tensor
    """Summed entropies."""
    background_weight: Tensor
    background_total: Tensor
    """(N,) each: weights and weighted logits of
    :func:`~cliquetta.methods.domain_norm.frequencies.background`."""
    freed_mass: Tensor
    """(N,): summed probabilities without background."""
    recent_mass: Tensor
    """(N,): the same of recent images."""

    @classmethod
    def load(cls, memory: Memory, domain: int) -> Counts:
        """Those of a domain."""
        return cls(*(memory[name][domain] for name in cls._fields))

    def store(self, memory: Memory, domain: int) -> None:
        """Replace those of a domain."""
        for name, value in zip(self._fields, self, strict=True):
            memory[name][domain] = value

    def add(self, zero_shot: Tensor, config: DomainNormConfig) -> Counts:
        """With the answers (b, N) to a batch."""
        freed, weight, total = remove_background(
            zero_shot, self.background_weight, self.background_total, config.background_images
        )
        freed_mass = freed.sum(dim=0)
        half_life = config.recent_images
        kept = 0.5 ** (len(zero_shot) / half_life) if half_life > 0 else 0.0
        return Counts(
            self.counted + len(zero_shot),
            self.answers + count_answers(zero_shot),
            self.class_mass + zero_shot.sum(dim=0),
            self.confidence + zero_shot.amax(dim=1).sum(),
            self.entropy + _entropy(zero_shot).sum(),
            weight,
            total,
            self.freed_mass + freed_mass,
            self.recent_mass * kept + freed_mass,
        )


class ClassStatistics(NamedTuple):
    """What the counts of a domain say about its classes."""

    marginal: Tensor
    """Mean probability (N,) of every class."""
    weights: Tensor
    """What answers are multiplied by (N,)."""
    prior: Tensor
    """Expected share (N,): the estimate as far as it is believed."""
    confidence: Tensor
    belief: Tensor


def class_statistics(counts: Counts, config: DomainNormConfig) -> ClassStatistics:
    """The statistics of a domain from its counts."""
    counted = counts.counted.clamp_min(1)
    marginal, confidence = counts.class_mass / counted, counts.confidence / counted
    power = config.frequency_power
    if config.prior != "estimated":
        believed = torch.full_like(confidence, float(config.prior == "zero-shot"))
        weights, prior = class_weights(marginal, power * believed), class_prior(marginal, believed)
        return ClassStatistics(marginal, weights, prior, confidence, believed)
    freed, plain = (
        class_frequencies(n, counts.counted) for n in (counts.freed_mass, counts.answers)
    )
    believed = belief(evenness(freed), confidence, config)
    share = plain_share(evenness(plain), confidence)
    prior = mix_frequencies(class_prior(freed, believed), plain, share)
    believed = torch.lerp(believed, torch.ones_like(believed), share)
    weights = class_weights(mix_frequencies(freed, plain, share), power * believed)
    if config.recent_images > 0:
        images = counts.recent_mass.sum()
        recent = class_frequencies(counts.recent_mass, images)
        bursting = burst(recent, freed, images)
        weights = weights ** (1 - bursting) * class_weights(recent, bursting)
    return ClassStatistics(marginal, weights, prior, confidence, believed)


@dataclass(frozen=True)
class Statistics:
    """What zero-shot answers in a domain say about the domain, read by the host."""

    marginal: Tensor
    weights: Tensor
    """What answers are multiplied by (N,)."""
    prior: Tensor
    """Expected class frequencies (N,)."""
    belief: Tensor
    trust: float
    """The belief, as the host reads it."""
    confidence: float
    agreement: float | None
    """Share of similar images with the same answer, in earlier batches."""
    step_size: float
    """Share of a full step."""
    information: float | None
    """Share of the entropy of the answers that the images explain, once it can be told."""
    abstain: bool
    """Whether that is too little to learn from."""


class Recent(NamedTuple):
    """What a domain's collapse is told by: similar images that agree, and recent answers (N,)."""

    agreement: Tensor
    recent_adapted: Tensor
    recent_plain: Tensor

    @classmethod
    def load(cls, memory: Memory, domain: int) -> Recent:
        """Those of a domain."""
        return cls(*(memory[name][domain] for name in cls._fields))


class Counted(NamedTuple):
    """A domain after a batch, on the device."""

    counts: Counts
    marginal: Tensor
    weights: Tensor
    prior: Tensor
    belief: Tensor
    figures: Tensor
    """What the host reads, (5,): confidence, belief, agreement, information, and 1 if collapsed."""

    def read(self, figures: Sequence[float], config: DomainNormConfig) -> tuple[Statistics, bool]:
        """The statistics with the figures as the host has read them; whether answers collapsed."""
        sure, taken, agreed, told, collapsed = figures
        found = Statistics(
            *(self.marginal, self.weights, self.prior, self.belief),
            trust=taken,
            confidence=sure,
            agreement=None if math.isnan(agreed) else agreed,
            step_size=step_size(sure, config),
            information=None if math.isnan(told) else told,
            abstain=told < config.abstain_below,
        )
        return found, bool(collapsed)


def count_batch(
    counts: Counts, recent: Recent, zero_shot: Tensor, config: DomainNormConfig
) -> Counted:
    """Count zero-shot answers (b, N) into a domain, without waiting for the device."""
    agreement = recent.agreement / counts.counted
    counts = counts.add(zero_shot, config)
    marginal, weights, prior, confidence, believed = class_statistics(counts, config)
    collapse = has_collapsed(recent.recent_adapted, recent.recent_plain)
    told = information(counts)
    figures = torch.stack([confidence, believed, agreement, told, collapse.to(confidence)])
    return Counted(counts, marginal, weights, prior, believed, figures)


def information(counts: Counts) -> Tensor:
    """Share () of the entropy of a domain's zero-shot answers that its images explain.

    With p the answer to an image, (H(mean p) - mean H(p)) / H(mean p): 0 if every image gets the
    same answer, as images do of which CLIP makes nothing; 1 if every answer is certain and they
    differ. NaN before ``TOLD_FROM`` images, since few explain too much or, one alone, nothing.
    """
    total = _entropy(counts.class_mass / counts.counted).clamp_min(1e-8)
    share = 1 - counts.entropy / counts.counted / total
    return torch.where(counts.counted < TOLD_FROM, torch.nan, share)


def _entropy(p: Tensor) -> Tensor:
    return log_prob_entropy(p.clamp_min(1e-8).log())


def step_size(confidence: float, config: DomainNormConfig) -> float:
    """Share of a full step at a mean zero-shot confidence."""
    scale = config.uncertainty_scale
    return min(1.0, (1 - confidence) / scale) if scale > 0 else 1.0


def watch_answers(memory: Memory, domain: int, p: Tensor, zero_shot: Tensor) -> None:
    """Count answers, older ones half as much after every ``WATCHED`` images."""
    for name, answers in (("recent_adapted", p), ("recent_plain", zero_shot)):
        recent = memory[name][domain]
        recent.mul_(0.5 ** (len(p) / WATCHED)).add_(count_answers(answers))


def has_collapsed(adapted: Tensor, plain: Tensor) -> Tensor:
    """Whether recent answers (N,) are one class where zero-shot CLIP's are several."""
    total, most = adapted.sum(), adapted.amax()
    of_plain = plain.gather(0, adapted.argmax(dim=0, keepdim=True))[0]
    return (total >= WATCHED) & (most > COLLAPSED * total) & (of_plain < DIVERSE * plain.sum())
