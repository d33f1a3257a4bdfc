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

import torch
from torch import Tensor

from cliquetta.methods._shared.config import MethodConfig, Positive, Weight
from cliquetta.methods._shared.feature_level import FixedText
from cliquetta.methods.base import BatchDependence
from cliquetta.methods.registry import register
from cliquetta.types import Prediction


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

    Their products with the images and their lengths follow from those at the start, so that a group
    is gone through in numbers of its own, on the CPU, whatever the width of the features.
    """

    def __init__(self, start: Tensor, features: Tensor) -> None:
        self.start, self.features = start, features
        self.products = (features @ start.T).cpu()  # (B, N)
        self.gram = (features @ features.T).cpu()
        self.squares = start.square().sum(dim=-1).cpu()
        self.kept = torch.ones_like(self.squares)
        self.shares = torch.zeros_like(self.products)

    def cosines(self, row: int) -> Tensor:
        """cos(μ, f) (N,) of image ``row``."""
        return self.products[row] / self.squares.sqrt()

    def learn(self, row: int, m: int, share: float) -> None:
        """Move μ_m by ``share`` of the way to image ``row``."""
        rest = 1 - share
        mixed = 2 * rest * share * self.products[row, m] + share**2 * self.gram[row, row]
        self.squares[m] = rest**2 * self.squares[m] + mixed
        self.products[:, m] = rest * self.products[:, m] + share * self.gram[row]
        self.kept[m] *= rest
        self.shares[:, m] *= rest
        self.shares[row, m] = share

    def means(self) -> Tensor:
        """μ (N, E) after all images."""
        kept, shares = self.kept.to(self.start), self.shares.to(self.start)
        return kept[:, None] * self.start + shares.T @ self.features


@register(
    "bca",
    paper="Zhou et al., Bayesian Test-Time Adaptation for Vision-Language Models, CVPR 2025",
)
class BCA(FixedText):
    """Running means of class embeddings and of the labels they stand for; no training.

    log of the posterior under adapted embeddings and priors.
    """

    batch_dependence = BatchDependence.SEQUENTIAL
    config: BCAConfig

    def _setup(self) -> None:
        super()._setup()
        N, real = len(self.prompts), self.classifier.dtype
        self.memory.declare("embeddings", self.classifier)
        self.memory.declare(
            "embedding_counts", torch.full((N,), self.config.likelihood_count, dtype=real)
        )
        self.memory.declare("priors", torch.eye(N, dtype=real))
        self.memory.declare("prior_counts", torch.full((N,), self.config.prior_count, dtype=real))

    def _predict_features(self, features: Tensor) -> Prediction:
        config, memory, features = self.config, self.memory, features[:, 0]
        embeddings = Embeddings(memory["embeddings"], features)
        counts, priors, prior_counts = (
            memory[name].clone() for name in ("embedding_counts", "priors", "prior_counts")
        )
        answers = torch.empty_like(embeddings.products)
        for row in range(len(features)):
            likelihood = (self.scale * embeddings.cosines(row)).softmax(dim=-1)
            answers[row] = likelihood @ priors
            m = int(likelihood.argmax())
            probability = float(likelihood[m])
            if probability > config.likelihood_threshold:
                counts[m] += 1
                embeddings.learn(row, m, 1 / float(counts[m]))
            if probability > config.prior_threshold:
                prior_counts[m] += 1
                priors[m] += (answers[row] - priors[m]) / prior_counts[m]
        memory["embeddings"], memory["embedding_counts"] = embeddings.means(), counts
        memory["priors"], memory["prior_counts"] = priors, prior_counts
        smallest = torch.finfo(answers.dtype).tiny
        return Prediction(answers.clamp_min(smallest).log().float().to(features.device))
