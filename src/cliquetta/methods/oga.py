"""OGA: a Gaussian per class from a cache of sure images, with the zero-shot prediction as prior.

Fuchs et al., Online Gaussian Test-Time Adaptation of Vision-Language Models, CVPR
Workshops 2025. Of every predicted class the eight images of lowest entropy are cached.
Means μ_k are the cache's, or the text of a class with fewer than two entries; they
share a covariance Σ. The posterior is

    z_k ∝ ŷ_k · softmax_k(τ log N(f; μ_k, Σ)),   τ = 0.05,

with ŷ the zero-shot prediction. While the cache has n ≤ 4E entries, Σ⁻¹ is the
empirical Bayes ridge estimate E ((n - 1) M + tr(M) I)⁻¹ of the pooled covariance M of
residuals, then M⁻¹; until one class has more than two entries it is E·I. As in the
official code (MIT) a batch enters the cache at once and is predicted with the
statistics after it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cliquetta.methods.building.base import BatchDependence
from cliquetta.methods.building.cache import declare, insert
from cliquetta.methods.building.config import Count, MethodConfig, NonNegative
from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.mixtures import linear_discriminant
from cliquetta.methods.building.registry import register
from cliquetta.types import Prediction

# Usual: 0.3; equal images have no spread, by which nothing may be divided.
SMALLEST_TRACE = 1e-6


@dataclass(frozen=True)
class OGAConfig(MethodConfig):
    """Online Gaussian adaptation with its authors' settings, the same for all datasets."""

    capacity: Count = 8  # Images cached per class.
    likelihood_weight: NonNegative = 0.05  # τ: weight of the Gaussian log-likelihood.
    divisor: Literal["capacity", "entries"] = "capacity"
    """Divisor of the sum of a class's entries: as in the code, or in the paper."""


def cache_means(
    keys: Tensor, filled: Tensor, text: Tensor, config: OGAConfig
) -> Tensor:
    """Average cached keys (N, K, E) where ``filled`` (N, K); below two, the text."""
    count = filled.sum(dim=1, keepdim=True)

    # of entries, or as in the official code of all slots
    divisor = config.capacity if config.divisor == "capacity" else count.clamp_min(1)
    means = (keys * filled[:, :, None]).sum(dim=1) / divisor

    # one entry is no distribution
    return torch.where(count >= 2, means, text)


def ridge_covariance(keys: Tensor, filled: Tensor, means: Tensor) -> Tensor:
    """Estimate Σ (E, E) of cached keys (N, K, E) around their class's mean.

    Conditions are tensors: to read a number of the device would wait for it.
    """
    width = keys.shape[2]

    # n, by class and in all
    counts = filled.sum(dim=1)
    entries = counts.sum()
    present = filled[:, :, None]

    # residuals of the entries, less their mean over all classes
    residual = (keys - means[:, None]) * present
    centre = residual.sum(dim=(0, 1)) / entries
    residual = ((residual - centre) * present).flatten(0, 1)

    # (n - 1) M and tr(M) of the pooled covariance M
    scatter = residual.T @ residual
    trace = (scatter.diagonal().sum() / (entries - 1)).clamp_min(SMALLEST_TRACE)

    # numerator and denominator of the ridge estimate, and of M once n > 4E
    few = entries <= 4 * width
    ridge = torch.where(few, trace, 1e-6 * (entries - 1) * trace)
    divisor = torch.where(few, width, entries - 1)

    # n ≤ 4E: Σ = ((n - 1) M + tr(M) I) / E; else M, with a ridge against rounding
    identity = torch.eye(width, dtype=keys.dtype, device=keys.device)
    covariance = (scatter + ridge * identity) / divisor

    # until one class has more than two entries, Σ⁻¹ = E·I
    return torch.where(counts.amax() <= 2, identity / width, covariance)


@register(
    "oga", presets={"paper": OGAConfig(divisor="entries")}, setting="all datasets"
)
class OGA(FixedText):
    """Gaussian classes from a cache of sure images, zero-shot predictions as prior; no training."""

    batch_dependence = BatchDependence.JOINT
    merge_rules = (("", "cache"),)
    config: OGAConfig

    def _setup(self) -> None:
        super()._setup()
        declare(self.memory, self.classifier, self.config.capacity)

    def _predict_features(self, features: Tensor) -> Prediction:
        features = features[:, 0]

        # a batch enters the cache at once, and is predicted with what that holds then
        logits, means, covariance = self.replay(self._learn, features)

        # z_k ∝ ŷ_k · softmax_k(τ log N(f; μ_k, Σ))
        likelihood = linear_discriminant(features, means, covariance)
        posterior = logits + self.config.likelihood_weight * likelihood
        return Prediction(posterior.log_softmax(dim=-1).float())

    def _learn(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Enter a batch (B, E) in the cache.

        Returns:
            Zero-shot logits (B, N); means (N, E) and covariance of the cache after it.

        """
        logits = self.scale * features @ self.classifier.T

        # the images of lowest entropy of every predicted class
        columns = {"keys": features}
        insert(self.memory, logits.argmax(dim=-1), entropy(logits), columns)

        # the Gaussians of what is cached
        keys = self.memory["keys"]
        filled = self.memory["entropy"].isfinite()
        means = cache_means(keys, filled, self.classifier, self.config)
        covariance = ridge_covariance(keys, filled, means)
        return logits, means, covariance
