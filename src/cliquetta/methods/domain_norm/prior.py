"""Which classes occur in a domain, from zero-shot predictions (Eq. 7 to 13, 20 and 21).

Under a shift zero-shot predictions bunch on some classes though all may occur (bias), and in a
stream of few classes they do so because the others are absent. The images of other classes show
a class's background, the logit that it gets where it is absent: bias raises the background, a class
prior does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods._shared.entropy import log_prob_entropy
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.state import Counts, Predicted
from cliquetta.tensor_tree import map_tensors

SHARPNESS, FOCUS, ROUNDS = 2.0, 4, 3  # constants of Eq. 8
CONFIDENT, FEW, BAND = 0.6, 0.3, 0.1  # of Eq. 11
HUB, HUB_BAND = 0.6, 0.2  # of Eq. 11, too
BURST = 0.3  # of Eq. 13
INFORMED = 64  # images of a domain from which its information is estimated, Eq. 20
COLLAPSED, DIVERSE, WATCHED = 0.95, 0.5, 128  # of Eq. 21


class ClassPrior(NamedTuple):
    """What the counts of a domain say about its classes."""

    marginal: Tensor  # m (N,), mean zero-shot prediction
    prior: Tensor  # π (N,)
    weights: Tensor  # w (N,), by which predictions are multiplied
    belief: Tensor  # β, how far the estimate is believed, 0 to 1
    confidence: Tensor  # c, mean zero-shot confidence


class Figures(NamedTuple):
    """What the host reads of a domain; NaN for what cannot be estimated yet."""

    confidence: float
    belief: float
    agreement: float  # share of neighbours with the same zero-shot class, in earlier batches
    information: float
    collapsed: float  # 1 or 0


class Observed(NamedTuple):
    """A domain after a batch."""

    counts: Counts
    prior: ClassPrior
    figures: Tensor  # the numbers of Figures, (5,)


def observe(
    counts: Counts, predicted: Predicted, zero_shot: Tensor, config: DomainNormConfig
) -> Observed:
    """Count zero-shot predictions (b, N) of a domain, without waiting for the device."""
    agreement = counts.agreement / counts.images
    counts = count(counts, zero_shot, config)
    prior = class_prior(counts, config)
    collapse = has_collapsed(predicted).to(agreement)
    figures = [prior.confidence, prior.belief, agreement, information(counts), collapse]
    return Observed(counts, prior, torch.stack(figures))


def recall(counts: Counts, p: Tensor, config: DomainNormConfig) -> Observed:
    """Count predictions (b, N) of a settled domain as recent ones, for want of zero-shot ones."""
    agreement = counts.agreement / counts.images
    counts = counts._replace(recent=fade(counts.recent, len(p), config) + p.sum(dim=0))
    prior = class_prior(counts, config)
    none = torch.zeros_like(agreement)
    figures = [prior.confidence, prior.belief, agreement, information(counts), none]
    return Observed(counts, prior, torch.stack(figures))


def fade(recent: Tensor, images: int, config: DomainNormConfig) -> Tensor:
    """Sums over recent images when more have come, Eq. 13."""
    half_life = config.recent_images
    return recent * (0.5 ** (images / half_life) if half_life > 0 else 0.0)


def count(counts: Counts, zero_shot: Tensor, config: DomainNormConfig) -> Counts:
    """Add the zero-shot predictions (b, N) of a batch, Eq. 7, 8 and 11."""
    a = centred_logits(zero_shot)
    q, absence, absent_logits = remove_background(
        a, counts.absence, counts.absent_logits, config.background_images
    )
    debiased, classes = q.sum(dim=0), counts.classes + count_classes(zero_shot)
    top = classes.argmax(dim=0, keepdim=True)
    same = top == counts.classes.argmax(dim=0, keepdim=True)
    return Counts(
        images=counts.images + len(q),
        confidence=counts.confidence + zero_shot.amax(dim=1).sum(),
        entropy=counts.entropy + entropy(zero_shot).sum(),
        agreement=counts.agreement,
        classes=classes,
        marginal=counts.marginal + zero_shot.sum(dim=0),
        absence=absence,
        absent_logits=absent_logits,
        debiased=counts.debiased + debiased,
        recent=fade(counts.recent, len(q), config) + debiased,
        moments=counts.moments * same + moments(a, zero_shot.index_select(1, top)),
    )


def class_prior(counts: Counts, config: DomainNormConfig) -> ClassPrior:
    """Estimate the class prior of a domain, Eq. 9 to 13."""
    images, power = counts.images.clamp_min(1), config.frequency_power
    marginal, confidence = counts.marginal / images, counts.confidence / images
    if config.prior != "estimated":
        beta = torch.full_like(confidence, float(config.prior == "zero-shot"))
        weights = class_weights(marginal, power * beta)
        return ClassPrior(marginal, tempered(marginal, beta), weights, beta, confidence)
    estimate = frequencies(counts.debiased, counts.images)
    plain = frequencies(counts.classes, counts.images)
    beta = belief(evenness(estimate), confidence, config)
    rho = plain_share(evenness(plain), confidence) * (1 - hubness(counts.moments, counts.classes))
    prior = mix(tempered(estimate, beta), plain, rho)
    beta = torch.lerp(beta, torch.ones_like(beta), rho)
    weights = class_weights(mix(estimate, plain, rho), power * beta)
    if config.recent_images > 0:
        images = counts.recent.sum()
        recent = frequencies(counts.recent, images)
        bursting = burst(recent, estimate, images)
        weights = weights ** (1 - bursting) * class_weights(recent, bursting)
    return ClassPrior(marginal, prior, weights, beta, confidence)


def background(absence: Tensor, absent_logits: Tensor, images: float) -> Tensor:
    """Background logit (N,) of each class, with so many ``images`` of the mean of all, Eq. 7."""
    mean = absent_logits.sum() / absence.sum().clamp_min(1e-6)
    return (absent_logits + images * mean) / (absence + images)


def centred_logits(zero_shot: Tensor) -> Tensor:
    """Logits a (b, N) less their mean over the classes, from predictions."""
    logits = zero_shot.clamp_min(torch.finfo(zero_shot.dtype).tiny).log()
    return logits - logits.mean(dim=1, keepdim=True)


def remove_background(
    a: Tensor, absence: Tensor, absent_logits: Tensor, images: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions q (b, N) without background, Eq. 8; its weights and sums with the batch."""
    A, B = absence, absent_logits
    q = (SHARPNESS * (a - background(A, B, images))).softmax(dim=1)
    for _ in range(ROUNDS):
        absent = (1 - q) ** FOCUS
        A, B = absence + absent.sum(dim=0), absent_logits + (absent * a).sum(dim=0)
        q = (SHARPNESS * (a - background(A, B, images))).softmax(dim=1)
    return q, A, B


def count_classes(p: Tensor) -> Tensor:
    """Images (N,) by predicted class; unlike ``bincount`` it does not wait for the device."""
    return torch.zeros_like(p[0]).scatter_add(0, p.argmax(dim=1), torch.ones_like(p[:, 0]))


def frequencies(mass: Tensor, images: Tensor) -> Tensor:
    """Class frequencies ν (N,) from summed predictions, all classes together one image, Eq. 9."""
    return (mass + 1 / len(mass)) / (images + 1)


def evenness(nu: Tensor) -> Tensor:
    """Effective share of the classes (): exp(entropy) / N of frequencies (N,), Eq. 9."""
    return entropy(nu).exp() / len(nu)


def belief(even: Tensor, confidence: Tensor, config: DomainNormConfig) -> Tensor:
    """How far an estimate of some evenness is believed, 0 to 1, Eq. 10."""
    rise = config.evenness_slope * (confidence - config.evenness_knee).clamp_min(0)
    limit = (config.evenness_floor + rise).clamp_max(config.evenness_cap)
    return ((limit - even) / config.evenness_band + 0.5).clamp(0, 1)


def plain_share(even: Tensor, confidence: Tensor) -> Tensor:
    """How far predicted classes, whose counts have some evenness, are the estimate, Eq. 11."""
    confident = ((confidence - CONFIDENT) / BAND + 0.5).clamp(0, 1)
    return confident * ((FEW - even) / BAND + 0.5).clamp(0, 1)


def moments(a: Tensor, weight: Tensor) -> Tensor:
    """Sums (4, N) of weights (b, 1), and of centred logits (b, N), their squares and cubes by them.

    For the skewness of Eq. 11.
    """
    powers = torch.stack([torch.ones_like(a), a, a.square(), a.pow(3)])
    return (weight * powers).sum(dim=1)


def hubness(M: Tensor, classes: Tensor) -> Tensor:
    """How far the most predicted class is a hub, which images of many classes look like, Eq. 11.

    Then each other class has a few images of its own among those, and its logits a long tail to
    the right; where the images are of the class, the other logits are nearly symmetric.
    """
    mean, square, cube = M[1:] / M[0].clamp_min(1e-6)
    variance = (square - mean.square()).clamp_min(1e-6)
    skewness = (cube - 3 * mean * square + 2 * mean.pow(3)) / variance.pow(1.5)
    others = skewness.scatter(0, classes.argmax(dim=0, keepdim=True), 0.0).sum()
    mean_skewness: Tensor = others / max(1, len(classes) - 1)
    return ((mean_skewness - HUB) / HUB_BAND + 0.5).clamp(0, 1)


def tempered(nu: Tensor, beta: Tensor) -> Tensor:
    """Frequencies (N,) to the power of the belief: uniform where it is 0, Eq. 12."""
    powered = nu.clamp_min(1e-8) ** beta
    return powered / powered.sum()


def mix(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Geometric mean of two frequencies (N,), ``share`` of the second, Eq. 12."""
    mixed = first ** (1 - share) * second**share
    return mixed / mixed.sum()


def class_weights(nu: Tensor, power: Tensor) -> Tensor:
    """Weights (N,) of the classes, 1 for the most frequent or before any image, Eq. 13."""
    floored = nu.clamp_min(1e-8)
    return (floored / floored.max()) ** power


def burst(recent: Tensor, estimate: Tensor, images: Tensor) -> Tensor:
    """How far recent images show fewer classes than so many of the domain would, 0 to 1, Eq. 13."""
    even = evenness(estimate)
    expected = even * -torch.expm1(-images / (even * len(estimate)))
    return ((1 - evenness(recent) / expected) / BURST).clamp(0, 1)


def information(counts: Counts) -> Tensor:
    """Share () of the entropy of a domain's predictions that its images explain, Eq. 20.

    NaN for few images, which explain too much.
    """
    total = entropy(counts.marginal / counts.images).clamp_min(1e-8)
    share = 1 - counts.entropy / counts.images / total
    return torch.where(counts.images < INFORMED, torch.nan, share)


def watch(predicted: Predicted, adapted: Tensor, zero_shot: Tensor) -> Predicted:
    """Count classes of predictions (b, N), older ones half as much after ``WATCHED`` images."""
    old = map_tensors(lambda sums: sums * 0.5 ** (len(adapted) / WATCHED), predicted)
    return Predicted(old.adapted + count_classes(adapted), old.zero_shot + count_classes(zero_shot))


def has_collapsed(predicted: Predicted) -> Tensor:
    """Whether recent predictions are one class where zero-shot CLIP's are several, Eq. 21."""
    adapted, plain = predicted
    total, most = adapted.sum(), adapted.amax()
    of_plain = plain.gather(0, adapted.argmax(dim=0, keepdim=True))[0]
    return (total >= WATCHED) & (most > COLLAPSED * total) & (of_plain < DIVERSE * plain.sum())


def entropy(p: Tensor) -> Tensor:
    """Entropy (...) of probabilities (..., N)."""
    return log_prob_entropy(p.clamp_min(1e-8).log())
