"""Which classes occur in a stream, estimated from zero-shot answers.

Under a shift CLIP's answers bunch on some classes though all may occur (bias), and in a stream of
few classes they do so because the others are absent (truth). One number per domain, the belief,
says how far an uneven marginal is taken for truth; the presence of each class says which ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cliquetta.methods._shared.entropy import log_prob_entropy
from cliquetta.methods.scap_domain.config import DomainSCAPConfig

SHORT_LIST, LONG_LIST = 16, 80
"""Class lists up to the first length are taken to occur whole; from the second on, only where
presence says so. In between, a straight line in the logarithm."""


def count_answers(p: Tensor) -> Tensor:
    """How often each class is the answer (N,) of probabilities (b, N).

    Unlike ``bincount`` it does not wait for the device.
    """
    ones = torch.ones_like(p[:, 0])
    return torch.zeros_like(p[0]).scatter_add(0, p.argmax(dim=1), ones)


def evenness(answers: Tensor) -> Tensor:
    """Effective share of the classes among counted answers (N,): exp(entropy) / N, at most 1.

    With few answers the plain entropy is too low; Miller and Madow's term is added.
    """
    total = answers.sum().clamp_min(1)
    shares = (answers / total).clamp_min(1e-8)
    found = log_prob_entropy(shares.log()) + ((answers > 0).sum() - 1).clamp_min(0) / (2 * total)
    return (found.exp() / len(answers)).clamp_max(1)


def belief(answers: Tensor, confidence: Tensor, config: DomainSCAPConfig) -> Tensor:
    """How far the zero-shot marginal is truth and not bias, 0 to 1; ``answers`` (N,) are counts.

    The less confident answers are, the less even they must be for the unevenness to be believed.
    """
    if config.prior != "estimated":
        return torch.full_like(confidence, float(config.prior == "zero-shot"))
    rise = config.evenness_slope * (confidence - config.evenness_knee).clamp_min(0)
    limit = (config.evenness_floor + rise).clamp_max(config.evenness_cap)
    return ((limit - evenness(answers)) / config.evenness_band + 0.5).clamp(0, 1)


def presence(marginal: Tensor, peak: Tensor) -> Tensor:
    """Presence (N,) of every class, at most 1 for the most present: MOON's sqrt(mean x max).

    ``marginal`` is the mean probability of each class, ``peak`` its mean maximum over windows of
    the stream: an absent class has neither much mass nor an image that looks like it.
    """
    found = (marginal * peak).clamp_min(1e-8).sqrt()
    return found / found.max()


def class_prior(marginal: Tensor, present: Tensor, believed: Tensor) -> Tensor:
    """Estimated class frequencies (N,) of a domain.

    Believed, they are the zero-shot marginal; otherwise uniform for a short list of classes and
    the presence for a long one, of which it is unlikely that every class occurs.
    """
    share = math.log(len(marginal) / SHORT_LIST) / math.log(LONG_LIST / SHORT_LIST)
    power = (1 - believed) * min(max(share, 0.0), 1.0)
    prior = marginal.clamp_min(1e-8) ** believed * present**power
    return prior / prior.sum()


def target_marginal(window: Tensor, stream: Tensor, prior: Tensor) -> Tensor:
    """The zero-shot marginal (N,) of a window of images, freed from the domain's bias.

    If zero-shot CLIP predicted class n with share ``stream[n]`` where its frequency is
    ``prior[n]``, it over-predicts n by their ratio, which is divided out. A window that truly
    holds few classes (a burst) keeps them.
    """
    corrected = window * prior / stream.clamp_min(1e-8)
    return corrected / corrected.sum()
