"""How often each class occurs in a domain, estimated from zero-shot answers.

Under a shift CLIP's answers bunch on some classes though all may occur (bias), and in a stream of
few classes they do so because the others are absent (truth). The stream itself tells the two apart:
its images of other classes show a class's background, the logit that it gets where it is absent.
Bias raises the background, frequency does not. Answers without the background are counted; how
uneven the counts are, and how confident CLIP is, says how far they are believed.

Classes may come in bursts. Where the most recent images show clearly fewer than expected,
answers are weighted by their recent frequencies.

A class that is nearly every answer leaves no images of others to see its background by: where CLIP
is confident and its answers are few of the classes, they are counted as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cliquetta.methods._shared.entropy import log_prob_entropy
from cliquetta.methods.domain_norm.config import DomainNormConfig

SHARPNESS, FOCUS, ROUNDS = 2.0, 4, 3
"""Scale of logits without background; power of 1 - p by which an image of probability p of a class
counts towards its background; how often the two are found from each other."""
SURE, FEW, BAND = 0.6, 0.3, 0.1
"""Confidence above which, and evenness below which, plain answers are counted; the width, centred
on each, over which that changes."""
BURST = 0.3
"""How far recent images must show fewer classes than expected for a burst that is beyond doubt."""


def count_answers(p: Tensor) -> Tensor:
    """How often each class is the answer (N,) of probabilities (b, N).

    Unlike ``bincount`` it does not wait for the device.
    """
    ones = torch.ones_like(p[:, 0])
    return torch.zeros_like(p[0]).scatter_add(0, p.argmax(dim=1), ones)


def background(weight: Tensor, total: Tensor, images: float) -> Tensor:
    """Background logit (N,) of each class, from weights (N,) and weighted sums of logits (N,).

    ``images`` is the weight of the mean background of all classes, which a class has that is every
    answer and leaves no images of others.
    """
    mean = total.sum() / weight.sum().clamp_min(1e-6)
    return (total + images * mean) / (weight + images)


def remove_background(
    zero_shot: Tensor, weight: Tensor, total: Tensor, images: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Answers (b, N) without background; its weights and sums with the batch counted.

    ``zero_shot`` (b, N) are probabilities, the rest is what :func:`background` takes.
    """
    logits = zero_shot.clamp_min(torch.finfo(zero_shot.dtype).tiny).log()
    logits = logits - logits.mean(dim=1, keepdim=True)
    others, weighted = weight, total
    p = _answers(logits, background(weight, total, images))
    for _ in range(ROUNDS):
        absent = (1 - p) ** FOCUS
        others, weighted = weight + absent.sum(dim=0), total + (absent * logits).sum(dim=0)
        p = _answers(logits, background(others, weighted, images))
    return p, others, weighted


def _answers(logits: Tensor, found: Tensor) -> Tensor:
    return (SHARPNESS * (logits - found)).softmax(dim=1)


def class_frequencies(mass: Tensor, images: Tensor) -> Tensor:
    """Share (N,) of each class, from summed answers; all classes together start with one image."""
    return (mass + 1 / len(mass)) / (images + 1)


def evenness(frequencies: Tensor) -> Tensor:
    """Effective share of the classes (): exp(entropy) / N of frequencies (N,)."""
    return log_prob_entropy(frequencies.clamp_min(1e-8).log()).exp() / len(frequencies)


def belief(even: Tensor, confidence: Tensor, config: DomainNormConfig) -> Tensor:
    """How far estimated frequencies are truth and not what is left of bias, 0 to 1.

    ``even`` is their evenness. The less confident answers are, the less even frequencies must be
    to be believed.
    """
    rise = config.evenness_slope * (confidence - config.evenness_knee).clamp_min(0)
    limit = (config.evenness_floor + rise).clamp_max(config.evenness_cap)
    return ((limit - even) / config.evenness_band + 0.5).clamp(0, 1)


def class_prior(frequencies: Tensor, believed: Tensor) -> Tensor:
    """Expected class frequencies (N,): the estimated ones where believed, else uniform."""
    prior = frequencies.clamp_min(1e-8) ** believed
    return prior / prior.sum()


def plain_share(even: Tensor, confidence: Tensor) -> Tensor:
    """How far plain answers, ``even`` by their counts, are taken for the frequencies, 0 to 1.

    Where CLIP is confident and its answers are few of the classes, that is no bias.
    """
    sure = (confidence - SURE) / BAND + 0.5
    few = (FEW - even) / BAND + 0.5
    return sure.clamp(0, 1) * few.clamp(0, 1)


def mix_frequencies(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Frequencies (N,), ``share`` of whose logarithm are those of the second."""
    mixed = first ** (1 - share) * second**share
    return mixed / mixed.sum()


def burst(recent: Tensor, domain: Tensor, images: Tensor) -> Tensor:
    """How far recent frequencies (N,) are those of a burst and not the domain's (N,), 0 to 1.

    So many recent ``images``, drawn by the domain's frequencies, would show 1 - exp(-images / K) of
    its K effective classes.
    """
    even = evenness(domain)
    expected = even * -torch.expm1(-images / (even * len(domain)))
    return ((1 - evenness(recent) / expected) / BURST).clamp(0, 1)


def class_weights(frequencies: Tensor, power: Tensor) -> Tensor:
    """What answers are multiplied by (N,), 1 for the most frequent class or before any image."""
    counted = frequencies.clamp_min(1e-8)
    return (counted / counted.max()) ** power


def target_marginal(window: Tensor, stream: Tensor, prior: Tensor) -> Tensor:
    """The zero-shot marginal (N,) of a window of images, freed from the domain's bias.

    If zero-shot CLIP predicted class n with share ``stream[n]`` where its frequency is
    ``prior[n]``, it over-predicts n by their ratio, which is divided out. A window that truly
    holds few classes (a burst) keeps them.
    """
    corrected = window * prior / stream.clamp_min(1e-8)
    return corrected / corrected.sum()
