"""Class frequencies of a domain, and trust in its predictions (Eq. 7 to 14, 20 and 21).

Bias, too, makes predictions bunch on few classes. It raises a class's background, the logit that
it gets where it is absent; frequency does not.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cliquetta.methods.building.entropy import prob_entropy
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.state import Counts

SHARPNESS, FOCUS, ROUNDS = 2.0, 4, 3  # constants of Eq. 8
CONFIDENT, FEW, BAND, HUB, HUB_BAND = 0.6, 0.3, 0.1, 0.6, 0.2  # of Eq. 11
BURST, INFORMED = 0.3, 64  # of Eq. 13 and of Eq. 20
COLLAPSED, DIVERSE, WATCHED = 0.95, 0.5, 128  # of Eq. 21


class ClassPrior(NamedTuple):
    """The class prior of a domain."""

    marginal: Tensor  # m (N,), mean zero-shot prediction
    prior: Tensor  # π (N,)
    weights: Tensor  # w (N,), by which predictions are multiplied
    belief: Tensor  # β, how far the estimate is believed, 0 to 1
    figures: Tensor  # (5,) the numbers of Figures


class Figures(NamedTuple):
    """Figures of a domain that the host reads; NaN for what cannot be estimated yet."""

    confidence: float
    belief: float
    agreement: float  # share of neighbours with the same zero-shot class, in earlier batches
    information: float
    collapsed: float  # 1 or 0


def count(counts: Counts, zero_shot: Tensor, config: DomainNormConfig) -> Counts:
    """Add the zero-shot predictions (b, N) of a batch, Eq. 7, 8 and 11."""
    logits = zero_shot.clamp_min(torch.finfo(zero_shot.dtype).tiny).log()
    a = logits - logits.mean(dim=1, keepdim=True)
    q, unbiased = remove_background(a, counts, config.background_images)
    classes = counts.classes + count_classes(zero_shot)
    top = classes.argmax(dim=0, keepdim=True)
    same = top == counts.classes.argmax(dim=0, keepdim=True)
    powers = torch.stack([torch.ones_like(a), a, a.square(), a.pow(3)])
    moments = (zero_shot.index_select(1, top) * powers).sum(dim=1)
    return count_recent(unbiased, q, config)._replace(
        images=counts.images + len(q),
        confidence=counts.confidence + zero_shot.amax(dim=1).sum(),
        entropy=counts.entropy + prob_entropy(zero_shot).sum(),
        classes=classes,
        marginal=counts.marginal + zero_shot.sum(dim=0),
        debiased=counts.debiased + q.sum(dim=0),
        moments=counts.moments * same + moments,
    )


def count_recent(counts: Counts, q: Tensor, config: DomainNormConfig) -> Counts:
    """Add predictions (b, N) to those of recent images alone, Eq. 13."""
    fade = 0.5 ** (len(q) / config.recent_images) if config.recent_images > 0 else 0.0
    return counts._replace(recent=counts.recent * fade + q.sum(dim=0))


def count_classes(p: Tensor) -> Tensor:
    """Images (N,) by predicted class; unlike ``bincount`` it does not wait for the device."""
    return torch.zeros_like(p[0]).scatter_add(0, p.argmax(dim=1), torch.ones_like(p[:, 0]))


def remove_background(a: Tensor, counts: Counts, images: float) -> tuple[Tensor, Counts]:
    """Predictions q (b, N) from centred logits a without background; A and B counted, Eq. 8."""
    A, B = counts.absence, counts.absent_logits
    for round in range(ROUNDS + 1):
        mean = B.sum() / A.sum().clamp_min(1e-6)
        background = (B + images * mean) / (A + images)  # g of Eq. 7
        q = (SHARPNESS * (a - background)).softmax(dim=1)
        if round < ROUNDS:
            absent = (1 - q) ** FOCUS
            A = counts.absence + absent.sum(dim=0)
            B = counts.absent_logits + (absent * a).sum(dim=0)
    return q, counts._replace(absence=A, absent_logits=B)


def class_prior(counts: Counts, config: DomainNormConfig) -> ClassPrior:
    """The class prior of a domain from its counts, Eq. 9 to 13, and whether to trust it."""
    images = counts.images.clamp_min(1)
    m, c = counts.marginal / images, counts.confidence / images
    if config.prior == "estimated":
        beta, prior, weights = estimate_prior(counts, c, config)
    else:
        beta = torch.full_like(c, float(config.prior == "zero-shot"))
        prior = normalize(m.clamp_min(1e-8) ** beta, p=1, dim=0)
        weights = class_weights(m, config.frequency_power * beta)
    agreement, collapsed = counts.agreement / counts.asked, has_collapsed(counts.predicted)
    figures = torch.stack([c, beta, agreement, information(counts), collapsed.to(c)])
    return ClassPrior(m, prior, weights, beta, figures)


def estimate_prior(counts: Counts, c: Tensor, config: DomainNormConfig) -> tuple[Tensor, ...]:
    """Belief β, prior π (N,) and weights w (N,) at a mean confidence c, Eq. 9 to 13."""
    nu, plain = (frequencies(C, counts.images) for C in (counts.debiased, counts.classes))
    beta = belief(nu, c, config)
    few = ramp(c - CONFIDENT, BAND) * ramp(FEW - evenness(plain), BAND)
    rho = few * (1 - ramp(skewness(counts) - HUB, HUB_BAND))  # Eq. 11
    tempered = normalize(nu**beta, p=1, dim=0)
    prior = normalize(tempered ** (1 - rho) * plain**rho, p=1, dim=0)  # Eq. 12
    beta = beta + (1 - beta) * rho
    weights = class_weights(nu ** (1 - rho) * plain**rho, config.frequency_power * beta)
    if config.recent_images > 0:
        weights = weigh_recent(weights, counts.recent, nu, c, config)
    return beta, prior, weights


def weigh_recent(w: Tensor, R: Tensor, nu: Tensor, c: Tensor, config: DomainNormConfig) -> Tensor:
    """Weights (N,) with the frequencies of recent images after a burst and in one, Eq. 13."""
    n, e = R.sum(), evenness(nu)
    recent = frequencies(R, n)
    o = ((evenness(recent) / evenness(frequencies(n * nu, n)) - 1) / BURST).clamp(0, 1)
    expected = e * -torch.expm1(-n / (e * len(nu)))
    r = ((1 - evenness(recent) / expected) / BURST).clamp(0, 1)
    w = w ** (1 - o) * class_weights(recent, config.frequency_power * belief(recent, c, config) * o)
    return w ** (1 - r) * class_weights(recent, r)


def belief(nu: Tensor, c: Tensor, config: DomainNormConfig) -> Tensor:
    """Belief in frequencies (N,) at a mean confidence, β of Eq. 10."""
    rise = config.evenness_slope * (c - config.evenness_knee).clamp_min(0)
    limit = (config.evenness_floor + rise).clamp_max(config.evenness_cap)
    return ramp(limit - evenness(nu), config.evenness_band)


def frequencies(mass: Tensor, images: Tensor) -> Tensor:
    """Class frequencies ν (N,) from summed predictions, all classes together one image, Eq. 9."""
    return (mass + 1 / len(mass)) / (images + 1)


def evenness(nu: Tensor) -> Tensor:
    """Effective share of the classes (): exp(entropy) / N of frequencies (N,), Eq. 9."""
    return prob_entropy(nu).exp() / len(nu)


def skewness(counts: Counts) -> Tensor:
    """Mean skewness σ () of the logits of all classes but the most predicted one, Eq. 11."""
    mean, square, cube = counts.moments[1:] / counts.moments[0].clamp_min(1e-6)
    variance = (square - mean.square()).clamp_min(1e-6)
    skewness = (cube - 3 * mean * square + 2 * mean.pow(3)) / variance.pow(1.5)
    others: Tensor = skewness.scatter(0, counts.classes.argmax(dim=0, keepdim=True), 0.0)
    return others.sum().div(max(1, len(others) - 1))


def class_weights(nu: Tensor, power: Tensor) -> Tensor:
    """Weights (N,) of the classes, 1 for the most frequent or before any image, Eq. 13."""
    floored = nu.clamp_min(1e-8)
    return (floored / floored.max()) ** power


def ramp(x: Tensor, band: float) -> Tensor:
    """0 below and 1 above a band around 0, linear in it."""
    return (x / band + 0.5).clamp(0, 1)


def step_size(confidence: float, config: DomainNormConfig) -> float:
    """Share λ of a full step at a mean zero-shot confidence, Eq. 14."""
    scale = config.uncertainty_scale
    return min(1.0, (1 - confidence) / scale) if scale > 0 else 1.0


def information(counts: Counts) -> Tensor:
    """Share () of the entropy of predictions that images explain, Eq. 20; NaN for few images."""
    total = prob_entropy(counts.marginal / counts.images).clamp_min(1e-8)
    share = 1 - counts.entropy / counts.images / total
    return torch.where(counts.images < INFORMED, torch.nan, share)


def has_collapsed(predicted: Tensor) -> Tensor:
    """Whether recent predictions are one class where zero-shot CLIP's are several, Eq. 21."""
    adapted, plain = predicted.unbind()
    total, most = adapted.sum(), adapted.amax()
    of_plain = plain.gather(0, adapted.argmax(dim=0, keepdim=True))[0]
    return (total >= WATCHED) & (most > COLLAPSED * total) & (of_plain < DIVERSE * plain.sum())
