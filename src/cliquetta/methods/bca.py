"""BCA: adapt what classes look like and, beside it, what their embeddings stand for.

Zhou et al., Bayesian Test-Time Adaptation for Vision-Language Models, CVPR 2025. One embedding μ_m
per class (at first its text) with a prior over labels P(Y | μ_m) (at first one-hot) answers by

    P(Y | f) = Σ_m P(μ_m | f) P(Y | μ_m),   P(μ_m | f) = softmax_m(scale f·μ_m).

With s the likeliest embedding: if P(μ_s | f) is above τ₁, f enters the running mean μ_s; if it is
above τ₂, P(Y | f) enters the running mean P(Y | μ_s). Images come one by one, and each is answered
before it is learned from. Thresholds and start counts are those of the TTABC comparison; the
authors' repository was not opened, as its licence is unknown. Ours: embeddings are normalised
where cosines are taken, not in the running mean, and images are plain views.

A group of images is answered at once. Which images taught which embedding is guessed, all
likelihoods follow from the guess, and from these a better one. An image depends on earlier ones
only, so that each pass settles at least one more; the first guess is nearly always right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods._shared.config import MethodConfig, Positive, Weight
from cliquetta.methods._shared.feature_level import ImageByImage
from cliquetta.methods.registry import register


@dataclass(frozen=True)
class BCAConfig(MethodConfig):
    """Bayesian class adaptation."""

    likelihood_threshold: Weight = 0.05
    """τ₁: an embedding learns from images that it explains with more than this probability."""
    likelihood_count: Positive = 20_000
    """Images that the text counts for in an embedding's running mean."""
    prior_threshold: Weight = 0.65
    """τ₂: a label prior learns from images above this probability."""
    prior_count: Positive = 1
    """Images that the one-hot start counts for in a label prior."""


def likelihoods(
    features: Tensor, means: Tensor, counts: Tensor, taught: Tensor, scale: float
) -> Tensor:
    """P(μ_m | f_i) (B, N) where μ_m is the mean of its start and earlier images.

    The start (N, E) counts ``counts`` (N,) times. Image j taught the embedding m if ``taught``
    (B, N) is 1 there, which is of use to the images after it.
    """
    gram = features @ features.T
    sums = counts * (features @ means.T) + gram.tril(-1) @ taught  # f_i·μ_m by the count
    growth = taught * (2 * sums + gram.diagonal()[:, None])  # |μ + f|² = |μ|² + 2 μ·f + |f|²
    squares = counts**2 * means.square().sum(dim=-1) + growth.cumsum(dim=0) - growth
    return (scale * sums / squares.sqrt()).softmax(dim=-1)


def likeliest(likelihood: Tensor, threshold: float) -> Tensor:
    """One (B, N) at an image's likeliest embedding, if that is above ``threshold``."""
    best = likelihood.max(dim=-1, keepdim=True)
    above = (best.values > threshold).to(likelihood.dtype)
    return torch.zeros_like(likelihood).scatter(1, best.indices, above)


def posteriors(likelihood: Tensor, priors: Tensor, counts: Tensor, taught: Tensor) -> Tensor:
    """P(Y | f_i) (B, N) where P(Y | μ_m) is the mean of its start and earlier answers.

    ``priors`` (N, N) count ``counts`` (N,) times. An answer is linear in those before it that
    ``taught`` (B, N) the priors: a triangular system.
    """
    shares = likelihood / (counts + taught.cumsum(dim=0) - taught)
    answers: Tensor = torch.linalg.solve_triangular(
        -shares @ taught.T, (shares * counts) @ priors, upper=False, unitriangular=True
    )
    return answers


def learn(means: Tensor, counts: Tensor, taught: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Running means (N, D) and their counts (N,) after the rows of ``values`` (B, D) taught."""
    total = counts + taught.sum(dim=0)
    return (counts[:, None] * means + taught.T @ values) / total[:, None], total


@register(
    "bca",
    paper="Zhou et al., Bayesian Test-Time Adaptation for Vision-Language Models, CVPR 2025",
)
class BCA(ImageByImage):
    """Running means of class embeddings and of the labels they stand for; no training.

    log of the posterior under adapted embeddings and priors.
    """

    config: BCAConfig

    def _setup(self) -> None:
        super()._setup()
        N, config, device = len(self.prompts), self.config, self.model.device
        declare = self.memory.declare
        declare("embeddings", self.classifier)
        declare("embedding_counts", torch.full((N,), float(config.likelihood_count), device=device))
        declare("priors", torch.eye(N, device=device))
        declare("prior_counts", torch.full((N,), float(config.prior_count), device=device))

    def answer(self, features: Tensor) -> Tensor:
        """Posteriors, each from the state that the images before it left."""
        memory, names = self.memory, ("embeddings", "embedding_counts", "priors", "prior_counts")
        before = [memory[name] for name in names]
        taught = features.new_zeros(len(features), len(self.prompts), dtype=torch.float64)
        for guesses in range(len(features) + 1):
            guessed = taught
            taught, answers, *learned = self._replayed(self._explain, features, *before, guessed)
            if guesses and torch.equal(taught, guessed):  # the first one would only be waited for
                break
        for name, values in zip(names, learned, strict=True):
            memory[name] = values
        return answers

    def _explain(self, features: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Which images taught which embedding if the last of ``state`` (B, N) is right about it.

        Behind it the answers and the rest of the state after them.
        """
        config = self.config
        wide, means, counts, priors, prior_counts, guessed = (
            values.double() for values in (features, *state)
        )
        likelihood = likelihoods(wide, means, counts, guessed, self.scale)
        taught = likeliest(likelihood, config.likelihood_threshold)
        judged = likeliest(likelihood, config.prior_threshold)
        answers = posteriors(likelihood, priors, prior_counts, judged)
        learned = *learn(means, counts, taught, wide), *learn(priors, prior_counts, judged, answers)
        kept = (new.to(old.dtype) for new, old in zip(learned, state[:-1], strict=True))
        return taught, answers, *kept
