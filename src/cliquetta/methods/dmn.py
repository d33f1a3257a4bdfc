"""DMN: a dynamic memory of test features that makes each query its own classifier.

Zhang et al., Dual Memory Networks: A Versatile Adaptation Approach for Vision-Language
Models, CVPR 2024; the zero-shot variant (dynamic memory only). Every image is offered
to the memory of its predicted class, which holds the 50 of lowest entropy beside the
class's text. For a query f the feature of class n is the mean of its entries m weighted
by exp(-β(1 - f·m)), normalised, and

    p = (softmax(scale f·text) + β₂ softmax(scale f·class feature)) / (1 + β₂).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.base import BatchDependence
from cliquetta.methods.building.cache import Affinity, affinity, declare, insert
from cliquetta.methods.building.config import Count, Fraction, NonNegative, Positive
from cliquetta.methods.building.entropy import marginal_entropy
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.views import (
    SelectiveConfig,
    confident_views,
    take_views,
)
from cliquetta.methods.registry import register
from cliquetta.types import Prediction

ELEMENTS = (
    2**25
)  # Elements of the class features computed at once: bounds memory (128 MiB).


@dataclass(frozen=True)
class DMNConfig(SelectiveConfig):
    """The dynamic memory with its authors' defaults."""

    views: Count = 32
    view_min_area: Fraction = 0.5
    """Smallest crop, as a fraction of the image's area: the authors crop half of it or more."""
    selection_fraction: Fraction = 0.1
    """ρ: fraction of the views, those of lowest entropy, that give class and entropy."""
    capacity: Count = 50  # Images stored per class.
    beta: NonNegative = 5.5
    """β: how fast an entry's weight falls with its distance from the query."""
    memory_weight: Positive = 1.0
    """β₂: weight of the memory's prediction relative to the text's; the authors search
    it on labels."""


def class_features(
    queries: Tensor, classes: Tensor, keys: Tensor, weights: Affinity, constant: Tensor
) -> Tensor:
    """Unit feature (B, N, E) of every class per query (B, E); ``constant``: weighted texts."""
    total = torch.einsum("bnk,nke->bne", weights.old, keys)
    owner = F.one_hot(classes, len(keys)).to(weights.new.dtype)  # (B, N)
    total = total + torch.einsum("bj,jn,je->bne", weights.new, owner, queries)
    return F.normalize(total + constant, dim=-1)


@register("dmn", presets={"fine-grained": DMNConfig(view_kind="augmix")})
class DMN(FixedText):
    """The text and a memory of 50 confident test features per class classify together."""

    batch_dependence = BatchDependence.SEQUENTIAL
    merge_rules = (("", "cache"),)
    config: DMNConfig

    def _setup(self) -> None:
        super()._setup()
        N, E = self.classifier.shape
        self.group = max(1, min(64, ELEMENTS // (N * E)))
        declare(self.memory, self.classifier, self.config.capacity)

    def _predict_features(self, features: Tensor) -> Prediction:
        groups = torch.split(features, self.group)
        return Prediction(torch.cat([self._logits(group) for group in groups]))

    def _logits(self, features: Tensor) -> Tensor:
        """Logits (B, N) of one group, which enters the memory."""
        config, memory = self.config, self.memory
        plain = features[:, 0]
        logits = self.scale * features @ self.classifier.T  # (B, V, N)
        sure = take_views(logits, confident_views(logits, config.selection_fraction))
        classes = sure.softmax(dim=-1).mean(dim=1).argmax(dim=-1)
        offered = marginal_entropy(sure)

        keys = memory["keys"]
        occupancy = insert(memory, classes, offered, {"keys": plain})
        weights = affinity(plain, keys, occupancy, config.beta)
        text = ((plain @ self.classifier.T - 1) * config.beta).exp()[
            :, :, None
        ] * self.classifier
        seen = class_features(plain, classes, keys, weights, text)
        dynamic = (self.scale * (seen @ plain[:, :, None])[:, :, 0]).log_softmax(dim=-1)
        fixed = logits[:, 0].log_softmax(dim=-1)
        weight = config.memory_weight
        return (
            torch.logaddexp(fixed, dynamic + math.log(weight)) - math.log1p(weight)
        ).float()
