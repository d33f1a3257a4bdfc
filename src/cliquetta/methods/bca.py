"""BCA: adapt what classes look like and, beside it, what their embeddings stand for.

Zhou et al., Bayesian Test-Time Adaptation for Vision-Language Models, CVPR 2025. One
embedding μ_m per class (at first its text) with a prior over labels P(Y | μ_m) (at
first one-hot) predicts by

    P(Y | f) = Σ_m P(μ_m | f) P(Y | μ_m),   P(μ_m | f) = softmax_m(scale f·μ_m).

With s the class of highest posterior P(Y | f): if that is above τ₁, f enters the
running mean μ_s, which is normalised again; if it is above τ₂, the posterior enters the
running mean P(Y | μ_s). Images come one by one, and each is predicted before it is
learned from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.methods.building.config import MethodConfig, Positive, Weight
from cliquetta.methods.building.feature_level import ImageByImage
from cliquetta.methods.building.memory import NON_NEGATIVE, SHORT
from cliquetta.methods.building.registry import register
from cliquetta.model.clip import l2_normalize


@dataclass(frozen=True)
class BCAConfig(MethodConfig):
    """Bayesian class adaptation."""

    likelihood_threshold: Weight = 0.05
    """τ₁: an embedding learns from images of a posterior above."""
    likelihood_count: Positive = 20_000
    """Images that the text counts for in an embedding's mean."""
    prior_threshold: Weight = 0.65
    """τ₂: a label prior learns from images of a posterior above."""
    prior_count: Positive = 1
    """Images that the one-hot start counts for in a label prior."""


@register("bca", setting="TTABC's port")
class BCA(ImageByImage):
    """Running means of class embeddings and of the labels they stand for; no training."""

    config: BCAConfig

    def _setup(self) -> None:
        super()._setup()
        memory = self.memory
        priors = torch.eye(len(self.prompts), device=self.model.device)
        ones = torch.ones_like(priors[0])

        # μ (N, E), at first the texts, and how many images each counts for
        counts = ones * self.config.likelihood_count
        memory.declare("embeddings", self.classifier, SHORT)
        memory.declare("embedding_counts", counts, NON_NEGATIVE)

        # P(Y | μ) (N, N), at first one-hot, and how many images each row counts for
        counts = ones * self.config.prior_count
        memory.declare("priors", priors, NON_NEGATIVE)
        memory.declare("prior_counts", counts, NON_NEGATIVE)

    def predict_group(self, features: Tensor) -> Tensor:
        """Predict posteriors (B, N), each from what the images before it left."""
        memory = self.memory
        embeddings = memory["embeddings"].clone()
        counts = memory["embedding_counts"].clone()
        priors = memory["priors"].clone()
        prior_counts = memory["prior_counts"].clone()

        posteriors = []
        for feature in features:
            # P(Y | f) = Σ_m P(μ_m | f) P(Y | μ_m)
            likelihood = (self.scale * embeddings @ feature).softmax(dim=0)
            posterior = likelihood.to(priors.dtype) @ priors
            posteriors.append(posterior)

            # s, the class of highest posterior, is the one that learns
            highest, label = posterior.max(dim=0, keepdim=True)

            # above τ₁ the feature enters the running mean of the embedding μ_s; by a
            # weight of 0 or 1, as a condition would wait for the GPU
            weight = (highest > self.config.likelihood_threshold).to(counts.dtype)
            summed = counts[label] * embeddings[label] + weight * feature
            embeddings[label] = l2_normalize(summed).to(embeddings.dtype)
            counts[label] += weight

            # above τ₂ the posterior enters the running mean of the prior P(Y | μ_s)
            weight = (highest > self.config.prior_threshold).to(prior_counts.dtype)
            count = prior_counts[label]
            summed = count * priors[label] + weight * posterior
            priors[label] = summed / (count + weight)
            prior_counts[label] = count + weight

        memory["embeddings"] = embeddings
        memory["embedding_counts"] = counts
        memory["priors"] = priors
        memory["prior_counts"] = prior_counts
        return torch.stack(posteriors)
