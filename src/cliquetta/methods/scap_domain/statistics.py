"""What the answers of a domain say about it: counted per domain in the adapter's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods._shared.entropy import log_prob_entropy
from cliquetta.methods._shared.memory import Memory
from cliquetta.methods.scap_domain.config import DomainSCAPConfig
from cliquetta.methods.scap_domain.presence import belief, class_prior, count_answers, presence

PEAK_WINDOW = 64
"""Images over which the maximum of a class's probability is taken."""
TOLD_FROM = 64
"""Images of a domain from which the information of its answers is told."""
COLLAPSED, DIVERSE, WATCHED = 0.95, 0.5, 128
"""Adaptation has collapsed if one class takes more than the first share of the recent answers of at
least the third number of images, and less than the second share of zero-shot CLIP's."""


@dataclass(frozen=True)
class Statistics:
    """What zero-shot answers in a domain say about the domain."""

    marginal: Tensor
    """Mean probability (N,) of every class."""
    present: Tensor
    prior: Tensor
    """Estimated class frequencies (N,)."""
    belief: float
    confidence: float
    agreement: float | None
    """Share of similar images with the same answer, in earlier batches."""
    step_size: float
    """Share of a full step."""
    information: float | None
    """Share of the entropy of the answers that the images explain, once it can be told."""
    abstain: bool
    """Whether that is too little to learn from."""


def count_batch(
    memory: Memory, domain: int, zero_shot: Tensor, config: DomainSCAPConfig
) -> tuple[Statistics, bool]:
    """Count zero-shot answers (b, N) into a domain; what they say, and whether it collapsed."""
    b = len(zero_shot)
    agreement = memory["agreement"][domain] / memory["counted"][domain]
    memory["counted"][domain] += b
    memory["answers"][domain] += count_answers(zero_shot)
    memory["class_mass"][domain] += zero_shot.sum(dim=0)
    memory["confidence"][domain] += zero_shot.amax(dim=1).sum()
    memory["entropy"][domain] += _entropy(zero_shot).sum()
    peak = memory["peak"][domain]
    torch.maximum(peak, zero_shot.amax(dim=0), out=peak)
    memory["peak_images"][domain] += b
    if memory["peak_images"][domain] >= PEAK_WINDOW:
        memory["peak_sum"][domain] += peak
        memory["peak_windows"][domain] += 1
        peak.zero_()
        memory["peak_images"][domain] = 0
    marginal, present, confidence, believed = class_statistics(memory, domain, config)
    prior = class_prior(marginal, present, believed)
    collapse = has_collapsed(memory, domain).to(confidence)
    # One wait for the device instead of five.
    sure, taken, agreed, collapsed, told = torch.stack(
        [confidence, believed, agreement, collapse, information(memory, domain)]
    ).tolist()
    found = Statistics(
        marginal,
        present,
        prior,
        belief=taken,
        confidence=sure,
        agreement=None if math.isnan(agreed) else agreed,
        step_size=step_size(sure, config),
        information=None if math.isnan(told) else told,
        abstain=told < config.abstain_below,
    )
    return found, bool(collapsed)


def information(memory: Memory, domain: int) -> Tensor:
    """Share () of the entropy of a domain's zero-shot answers that its images explain.

    With p the answer to an image, (H(mean p) - mean H(p)) / H(mean p): 0 if every image gets the
    same answer, as images do of which CLIP makes nothing; 1 if every answer is certain and they
    differ. NaN before ``TOLD_FROM`` images, since few explain too much or, one alone, nothing.
    """
    counted = memory["counted"][domain]
    total = _entropy(memory["class_mass"][domain] / counted).clamp_min(1e-8)
    share = 1 - memory["entropy"][domain] / counted / total
    return torch.where(counted < TOLD_FROM, torch.nan, share)


def _entropy(p: Tensor) -> Tensor:
    return log_prob_entropy(p.clamp_min(1e-8).log())


def class_statistics(
    memory: Memory, domain: int, config: DomainSCAPConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Marginal and presence (N,), confidence and belief () of what a domain has counted."""
    windows = int(memory["peak_windows"][domain])
    counted = memory["counted"][domain].clamp_min(1)
    marginal = memory["class_mass"][domain] / counted
    confidence = memory["confidence"][domain] / counted
    peak = memory["peak_sum"][domain] / windows if windows else memory["peak"][domain]
    believed = belief(memory["answers"][domain], confidence, config)
    return marginal, presence(marginal, peak), confidence, believed


def step_size(confidence: float, config: DomainSCAPConfig) -> float:
    """Share of a full step at a mean zero-shot confidence."""
    scale = config.uncertainty_scale
    return min(1.0, (1 - confidence) / scale) if scale > 0 else 1.0


def watch_answers(memory: Memory, domain: int, p: Tensor, zero_shot: Tensor) -> None:
    """Count answers, older ones half as much after every ``WATCHED`` images."""
    for name, answers in (("recent_adapted", p), ("recent_plain", zero_shot)):
        recent = memory[name][domain]
        recent.mul_(0.5 ** (len(p) / WATCHED)).add_(count_answers(answers))


def has_collapsed(memory: Memory, domain: int) -> Tensor:
    """Whether recent answers are one class where zero-shot CLIP's are several."""
    adapted, plain = memory["recent_adapted"][domain], memory["recent_plain"][domain]
    total = adapted.sum()
    top = adapted.argmax()
    one_class = adapted[top] > COLLAPSED * total
    return (total >= WATCHED) & one_class & (plain[top] < DIVERSE * plain.sum())
