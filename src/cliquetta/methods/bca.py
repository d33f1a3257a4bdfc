"""BCA: adapt what classes look like and, beside it, what their embeddings stand for.

Zhou et al., Bayesian Test-Time Adaptation for Vision-Language Models, CVPR 2025. One embedding μ_m
per class (at first its text) with a prior over labels P(Y | μ_m) (at first one-hot) answers by

    P(Y | f) = Σ_m P(μ_m | f) P(Y | μ_m),   P(μ_m | f) = softmax_m(scale f·μ_m).

With s the likeliest embedding: if P(μ_s | f) is above τ₁, f enters the running mean μ_s; if it is
above τ₂, P(Y | f) enters the running mean P(Y | μ_s). Images come one by one, and each is answered
before it is learned from. Thresholds and start counts are those of the TTABC comparison; the
authors' repository was not opened, as its licence is unknown. Ours: embeddings are normalised
where cosines are taken, not in the running mean, and images are plain views.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cliquetta.methods._shared.config import MethodConfig, Positive, Weight
from cliquetta.methods._shared.feature_level import ImageByImage, Numbers, numbers, softmax
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


class Embeddings:
    """Running means μ_m = kept_m start_m + Σ_j share_jm f_j over a group of images f.

    Their products with the images and their lengths follow from those at the start.
    """

    def __init__(self, start: Tensor, features: Tensor) -> None:
        self.start, self.features = start, features
        both = numbers(torch.cat([start, features]) @ torch.cat([start, features]).T)
        N = len(start)
        self.products = both[:N, N:]  # (N, B)
        self.gram = both[N:, N:]
        self.squares = both.diagonal()[:N].copy()
        self.kept, self.shares = np.ones(N), np.zeros_like(self.products)

    def cosines(self, row: int) -> Numbers:
        """cos(μ, f) (N,) of image ``row``."""
        found: Numbers = self.products[:, row] / np.sqrt(self.squares)
        return found

    def learn(self, row: int, m: int, share: float) -> None:
        """Move μ_m by ``share`` of the way to image ``row``."""
        rest = 1 - share
        mixed = 2 * rest * share * self.products[m, row] + share**2 * self.gram[row, row]
        self.squares[m] = rest**2 * self.squares[m] + mixed
        self.products[m] = rest * self.products[m] + share * self.gram[row]
        self.kept[m] *= rest
        self.shares[m] *= rest
        self.shares[m, row] = share

    def means(self) -> Tensor:
        """μ (N, E) after all images."""
        kept, shares = (torch.from_numpy(x).to(self.start) for x in (self.kept, self.shares))
        return kept[:, None] * self.start + shares @ self.features


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
        N, config = len(self.prompts), self.config
        self.memory.declare("embeddings", self.classifier)
        self.memory.declare("embedding_counts", torch.full((N,), float(config.likelihood_count)))
        self.memory.declare("priors", torch.eye(N))
        self.memory.declare("prior_counts", torch.full((N,), float(config.prior_count)))

    def answer(self, features: Tensor) -> Numbers:
        """Posteriors, each from the state that the images before it left."""
        config, memory = self.config, self.memory
        embeddings = Embeddings(memory["embeddings"], features)
        counts, priors, prior_counts = (
            numbers(memory[name]) for name in ("embedding_counts", "priors", "prior_counts")
        )
        answers = np.empty((len(features), len(priors)))
        for row in range(len(features)):
            likelihood = softmax(self.scale * embeddings.cosines(row))
            answers[row] = likelihood @ priors
            m = int(likelihood.argmax())
            probability = likelihood[m]
            if probability > config.likelihood_threshold:
                counts[m] += 1
                embeddings.learn(row, m, 1 / counts[m])
            if probability > config.prior_threshold:
                prior_counts[m] += 1
                priors[m] += (answers[row] - priors[m]) / prior_counts[m]
        memory["embeddings"] = embeddings.means()
        learned = {"embedding_counts": counts, "priors": priors, "prior_counts": prior_counts}
        for name, values in learned.items():
            memory[name] = torch.from_numpy(values).to(memory[name])
        return answers
