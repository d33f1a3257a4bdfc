"""Which classes occur in a domain, and how far that is believed (Eq. 5 to 10).

Bias, too, makes predictions bunch on few classes. It raises a class's background, the
logit that it gets where it is absent; frequency does not. And few images of many
classes look uneven by chance: frequencies are compared with those that as many images
of equally frequent classes show.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.entropy import prob_entropy
from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.state import Counts

SHARPNESS = 2.0  # of the debiased predictions, Eq. 5
FOCUS = 4  # power of absence, Eq. 5
DRAWS = 256  # terms of the sum in Eq. 7 ...
# ... and draws per class beyond which their number no longer matters
MOST_DRAWS = 100.0
CHANCE = 4.0  # standard deviations by which evenness may fall short by chance, Eq. 7
BAND = 0.1  # width over which belief rises, Eq. 8 and 9
UNSURE = 0.5  # mean confidence up to which the lower limit of evenness holds, Eq. 8 ...
SURE = 0.9  # ... and from which the higher one does
CONFIDENT = 0.6  # mean confidence from which few predicted classes are believed, Eq. 9
FEW = 0.3  # relative evenness of predicted classes that are few, Eq. 9
HUB = 0.6  # skewness of a hub, Eq. 9 ...
HUB_BAND = 0.2  # ... and the width over which it becomes one
BURST = 0.3  # share of the expected evenness that a full burst lacks, Eq. 10


class ClassPrior(NamedTuple):
    """The class prior of a domain."""

    marginal: Tensor  # m (N,), mean zero-shot prediction
    prior: Tensor  # π (N,)
    log_weights: Tensor  # (N,), logarithms of the weights of predictions, Eq. 13
    belief: Tensor  # how far frequencies are believed, β + (1 - β) ρ
    burst: Tensor  # r, 0 to 1


def count(counts: Counts, zero_shot: Tensor, config: DomainNormConfig) -> Counts:
    """Add the zero-shot predictions z (b, N) of a batch, Eq. 5 and 9."""
    tiny = torch.finfo(zero_shot.dtype).tiny
    logits = zero_shot.clamp_min(tiny).log()
    a = logits - logits.mean(dim=1, keepdim=True)

    # An image counts for the background of the classes that it is not of.
    first = remove_background(a, counts.absence, counts.absent_logits)
    absent = (1 - first) ** FOCUS  # (b, N)
    absence = counts.absence + absent.sum(dim=0)
    absent_logits = counts.absent_logits + (absent * a).sum(dim=0)
    q = remove_background(a, absence, absent_logits)

    # Moments of the logits start again when another class becomes the most predicted
    # one.
    classes = counts.classes + count_classes(zero_shot)
    top = classes.argmax(dim=0, keepdim=True)
    same = top == counts.classes.argmax(dim=0, keepdim=True)
    powers = torch.stack([torch.ones_like(a), a, a.square(), a.pow(3)])  # (4, b, N)
    moments = (zero_shot.index_select(1, top) * powers).sum(dim=1)

    return count_recent(counts, q, config)._replace(
        images=counts.images + len(q),
        confidence=counts.confidence + zero_shot.amax(dim=1).sum(),
        marginal=counts.marginal + zero_shot.sum(dim=0),
        classes=classes,
        moments=counts.moments * same + moments,
        absence=absence,
        absent_logits=absent_logits,
        debiased=counts.debiased + q.sum(dim=0),
        concentration=counts.concentration + q.square().sum(),
    )


def count_recent(counts: Counts, q: Tensor, config: DomainNormConfig) -> Counts:
    """Add predictions q (b, N) to the recent ones, which fade, Eq. 10."""
    kept = 0.0
    if config.recent_images > 0:
        kept = 0.5 ** (len(q) / config.recent_images)
    return counts._replace(
        recent=kept * counts.recent + q.sum(dim=0),
        recent_concentration=kept * counts.recent_concentration + q.square().sum(),
    )


def count_classes(p: Tensor) -> Tensor:
    """Count images (N,) by predicted class; unlike ``bincount`` it does not wait for a GPU."""
    return torch.zeros_like(p[0]).scatter_add(
        0, p.argmax(dim=1), torch.ones_like(p[:, 0])
    )


def remove_background(a: Tensor, absence: Tensor, absent_logits: Tensor) -> Tensor:
    """Compute predictions q (b, N) from centred logits a, less each class's background, Eq. 5."""
    # The background g (N,) of a class: one image weighs on it like the mean of all.
    every_absence = absence.sum().clamp_min(1e-6)
    common = absent_logits.sum() / every_absence
    background = (absent_logits + common) / (absence + 1)

    sharper = SHARPNESS * (a - background)
    return sharper.softmax(dim=1)


def class_prior(counts: Counts, config: DomainNormConfig) -> ClassPrior:
    """Estimate the class prior of a domain from its counts, Eq. 6 to 10."""
    n = counts.images.clamp_min(1)
    marginal = counts.marginal / n
    classes = len(marginal)
    if config.prior == "uniform":
        uniform = torch.full_like(marginal, 1 / classes)
        zero = torch.zeros_like(n)
        return ClassPrior(marginal, uniform, torch.zeros_like(marginal), zero, zero)

    # Eq. 6 to 8: debiased frequencies, as far as they are more uneven than bias leaves
    # them.
    confidence = counts.confidence / n
    weight = draw_weight(counts.concentration / n, classes)
    nu = frequencies(counts.debiased, counts.images)
    relative, chance = relative_evenness(nu, n, weight)
    limit = evenness_limit(confidence, config)
    belief = ramp(limit - relative * chance, BAND)

    # Eq. 9: few predicted classes as they are.
    few = predicts_few(counts, confidence)
    plain = frequencies(counts.classes, counts.images)
    debiased = (1 - few) * belief * nu.log()
    log_prior = (debiased + few * plain.log()).log_softmax(dim=0)
    belief = belief + (1 - belief) * few
    if config.recent_images == 0:
        burst = torch.zeros_like(n)
        return ClassPrior(marginal, log_prior.exp(), log_prior, belief, burst)

    # Eq. 10: in a burst, recent images show fewer classes than so many images of the
    # domain would.
    present = classes * relative.clamp_max(1.0)
    recent_images = counts.recent.sum()
    recent = frequencies(counts.recent, recent_images)
    recent_evenness = evenness(recent)
    concentration = counts.recent_concentration / recent_images.clamp_min(1e-6)
    weight = draw_weight(concentration, classes)
    expected = expected_evenness(recent_images, weight, present) * present / classes
    fewer = 1 - recent_evenness / expected

    # After a burst they show more than the domain's frequencies.
    as_domain = frequencies(recent_images * log_prior.exp(), recent_images)
    more = recent_evenness / evenness(as_domain) - 1

    burst = (torch.maximum(fewer, more) / BURST).clamp(0, 1)
    log_weights = (1 - burst) * log_prior + burst * recent.log()
    return ClassPrior(marginal, log_prior.exp(), log_weights, belief, burst)


def predicts_few(counts: Counts, confidence: Tensor) -> Tensor:
    """Tell how far predicted classes are believed as they are, ρ () of Eq. 9.

    A class of nearly every image leaves none to see its background by. Where CLIP is
    confident and predicts few classes, these occur, unless one of them is a hub that
    all images look like.
    """
    # How even the predicted classes are; a count of images has no soft parts.
    n = counts.images.clamp_min(1)
    plain = frequencies(counts.classes, counts.images)
    certain = torch.ones_like(n)
    weight = certain - 1 / len(plain)
    relative, chance = relative_evenness(plain, n, weight)

    # All three conditions must hold.
    sure = ramp(confidence - CONFIDENT, BAND)
    few = ramp(FEW - relative * chance, BAND)
    hub = ramp(skewness(counts) - HUB, HUB_BAND)
    return sure * few * (1 - hub)


def skewness(counts: Counts) -> Tensor:
    """Compute the mean skewness () of the logits of all classes but the most predicted, Eq. 9."""
    weights = counts.moments[0].clamp_min(1e-6)
    mean, square, cube = counts.moments[1:] / weights  # each (N,)

    # Central moments from those around zero.
    variance = (square - mean.square()).clamp_min(1e-6)
    third = cube - 3 * mean * square + 2 * mean.pow(3)
    by_class = third / variance.pow(1.5)

    # The most predicted class itself does not count.
    top = counts.classes.argmax(dim=0, keepdim=True)
    others: Tensor = by_class.scatter(0, top, 0.0)
    count = max(1, len(by_class) - 1)
    return others.sum() / count


def relative_evenness(
    nu: Tensor, images: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compare the evenness of frequencies (N,) with that of equally frequent classes, Eq. 7.

    Returns:
        Their ratio, and the factor by which chance may make it smaller.

    """
    classes = len(nu)
    expected = expected_evenness(images, weight, classes)
    ratio = evenness(nu) / expected

    # Of the logarithm of evenness, whose spread is that of a chi-squared distribution.
    freedom = classes - 1
    deviation = weight * (freedom / 2) ** 0.5 / images
    return ratio, (CHANCE * deviation).exp()


def draw_weight(concentration: Tensor, classes: int) -> Tensor:
    """Compute the weight w () of a draw from the mean of |q|², Eq. 7."""
    return (concentration - 1 / classes).clamp_min(1e-4)


def frequencies(mass: Tensor, images: Tensor) -> Tensor:
    """Compute frequencies ν (N,) from summed predictions and one image of all classes, Eq. 6."""
    return (mass + 1 / len(mass)) / (images + 1)


def evenness(nu: Tensor) -> Tensor:
    """Compute the effective share of the classes, exp(entropy) / N, of frequencies (N,), Eq. 6."""
    return prob_entropy(nu).exp() / len(nu)


def expected_evenness(
    images: Tensor, weight: Tensor, classes: Tensor | float
) -> Tensor:
    """Compute the evenness that images of equally frequent classes would show, Eq. 7.

    The sum of a class's predictions is that of a Poisson number of draws of one weight
    each, which has their mean and variance. ``classes`` need not be a whole number.
    """
    most = MOST_DRAWS * classes
    draws = (images / weight).clamp_max(most)
    weight = images / draws
    per_class = draws / classes

    # Chances of k = 0, 1, ... draws of a class.
    k = torch.arange(DRAWS, device=images.device, dtype=images.dtype)
    log_factorial = torch.lgamma(k + 1)
    log_chance = k * per_class.log() - per_class - log_factorial
    chance = log_chance.exp()

    # Frequency of a class with k draws, as in Eq. 6, and the entropy of all classes.
    nu = (weight * k + 1 / classes) / (images + 1)
    by_draws = chance * nu * nu.log()
    entropy = -classes * by_draws.sum()
    return entropy.exp() / classes


def evenness_limit(confidence: Tensor, config: DomainNormConfig) -> Tensor:
    """Compute the relative evenness below which frequencies are believed, Eq. 8."""
    low, high = config.evenness_limits
    along = (confidence - UNSURE) / (SURE - UNSURE)
    share = along.clamp(0, 1)
    return low + (high - low) * share


def ramp(x: Tensor, band: float) -> Tensor:
    """Rise from 0 to 1 over a band around 0."""
    return (x / band + 0.5).clamp(0, 1)
