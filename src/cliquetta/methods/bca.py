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
from cliquetta.methods.registry import register
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
        config, declare = self.config, self.memory.declare
        priors = torch.eye(len(self.prompts), device=self.model.device)
        ones = torch.ones_like(priors[0])
        declare("embeddings", self.classifier, SHORT)
        declare("embedding_counts", ones * config.likelihood_count, NON_NEGATIVE)
        declare("priors", priors, NON_NEGATIVE)
        declare("prior_counts", ones * config.prior_count, NON_NEGATIVE)

    def predict_group(self, features: Tensor) -> Tensor:
        """Posteriors, each from the state that the images before it left."""
        config, memory = self.config, self.memory
        names = ("embeddings", "embedding_counts", "priors", "prior_counts")
        embeddings, counts, priors, prior_counts = (
            memory[name].clone() for name in names
        )
        posteriors = []
        for feature in features:
            posterior = (self.scale * embeddings @ feature).softmax(dim=0).to(
                priors.dtype
            ) @ priors
            best, label = posterior.max(dim=0, keepdim=True)
            posteriors.append(posterior)
            # a weight of 0 or 1 instead of a condition, for which a GPU would be waited
            # for
            taught = (best > config.likelihood_threshold).to(counts.dtype)
            moved = counts[label] * embeddings[label] + taught * feature
            embeddings[label] = l2_normalize(moved).to(embeddings.dtype)
            counts[label] += taught
            judged = (best > config.prior_threshold).to(prior_counts.dtype)
            before = prior_counts[label]
            priors[label] = (before * priors[label] + judged * posterior) / (
                before + judged
            )
            prior_counts[label] = before + judged
        for name, values in zip(
            names, (embeddings, counts, priors, prior_counts), strict=True
        ):
            memory[name] = values
        return torch.stack(posteriors)
