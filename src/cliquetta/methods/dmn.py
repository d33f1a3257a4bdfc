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

from cliquetta.methods.building.base import BatchDependence
from cliquetta.methods.building.cache import Affinity, affinity, declare, insert
from cliquetta.methods.building.config import Count, Fraction, NonNegative, Positive
from cliquetta.methods.building.entropy import marginal_entropy
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.views import (
    SelectiveConfig,
    confident_views,
    take_views,
)
from cliquetta.types import Prediction

# Elements of the class features computed at once: bounds memory (128 MiB).
ELEMENTS = 2**25


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
    """Average the weighted entries of every class: unit features (B, N, E) per query.

    Args:
        queries: Features (B, E), which enter the memory one after the other.
        classes: Predicted class (B,) of each.
        keys: Entries (N, K, E) before the first query.
        weights: Of both kinds of entries, as each query arrives.
        constant: Weighted class texts (B, N, E).

    """
    # entries from earlier batches
    total = torch.einsum("bnk,nke->bne", weights.old, keys)

    # entries that the batch itself made, each under its class, (B, N)
    member = F.one_hot(classes, len(keys))
    member = member.to(weights.new.dtype)
    total = total + torch.einsum("bj,jn,je->bne", weights.new, member, queries)

    # beside the text of the class
    return F.normalize(total + constant, dim=-1)


@register("dmn", presets={"fine-grained": DMNConfig(view_kind="augmix")})
class DMN(FixedText):
    """The text and a memory of 50 confident test features per class classify together."""

    batch_dependence = BatchDependence.SEQUENTIAL
    merge_rules = (("", "cache"),)
    config: DMNConfig

    def _setup(self) -> None:
        super()._setup()
        declare(self.memory, self.classifier, self.config.capacity)

        # class features are a tensor (B, N, E)
        self.group = max(1, min(64, ELEMENTS // self.classifier.numel()))

    def _predict_features(self, features: Tensor) -> Prediction:
        groups = torch.split(features, self.group)
        return Prediction(torch.cat([self._logits(group) for group in groups]))

    def _logits(self, features: Tensor) -> Tensor:
        """Predict one group (B, V, E), which enters the memory: logits (B, N)."""
        beta = self.config.beta
        plain = features[:, 0]

        # by the texts alone, (B, V, N)
        logits = self.scale * features @ self.classifier.T

        # the confident views name the class and give the entropy
        index = confident_views(logits, self.config.selection_fraction)
        confident = take_views(logits, index)
        classes = confident.softmax(dim=-1).mean(dim=1).argmax(dim=-1)
        offered = marginal_entropy(confident)

        # the plain view is offered to the memory of that class
        keys = self.memory["keys"]
        occupancy = insert(self.memory, classes, offered, {"keys": plain})

        # exp(-β(1 - f·m)) of the entries m of a class
        weights = affinity(plain, keys, occupancy, beta)

        # and of its text, which is one of them
        text_weights = ((plain @ self.classifier.T - 1) * beta).exp()  # (B, N)
        text = text_weights[:, :, None] * self.classifier

        # for each query a classifier of its own, (B, N, E)
        by_query = class_features(plain, classes, keys, weights, text)

        cosines = (by_query @ plain[:, :, None])[:, :, 0]
        dynamic = (self.scale * cosines).log_softmax(dim=-1)
        fixed = logits[:, 0].log_softmax(dim=-1)

        # p = (p_text + β₂ p_memory) / (1 + β₂), in logarithms
        weight = self.config.memory_weight
        mixed = torch.logaddexp(fixed, dynamic + math.log(weight))
        return (mixed - math.log1p(weight)).float()
