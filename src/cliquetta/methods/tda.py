"""TDA: two caches of test features, one for what classes look like, one for what they are not.

Karmanov et al., Efficient Test-Time Adaptation of Vision-Language Models, CVPR 2024.
Every image is offered to the positive cache of its predicted class; if its entropy is
within a middle window also to the negative one, together with the classes that it could
be. Then

    logits = CLIP's + α₊ Σ exp(-β₊(1 - f·k)) [class of k] - α₋ Σ exp(-β₋(1 - f·k)) [p(k) in window]

over the entries k of the two caches. No gradients.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.base import BatchDependence
from cliquetta.methods.building.cache import (
    Affinity,
    Columns,
    affinity,
    declare,
    insert,
)
from cliquetta.methods.building.config import Count, Interval, NonNegative, read_presets
from cliquetta.methods.building.entropy import marginal_entropy
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.memory import Range
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.views import (
    SelectiveConfig,
    ViewKind,
    confident_views,
    take_views,
)
from cliquetta.types import Prediction

# Images predicted at once: bounds memory. Changes results by rounding only.
GROUP = 256
# Size up to which a matrix of entries by classes is made: a product is faster.
DENSE = 2**24
# By how much a sum of probabilities may exceed one.
SUM_ROUNDING = 1e-3


@dataclass(frozen=True)
class TDAConfig(SelectiveConfig):
    """TDA with its authors' setting for ImageNet."""

    views: Count = 1
    """Views per image, including the plain one; 1 uses the plain one only."""
    view_kind: ViewKind = "augmix"  # How views are made; unused with one view.
    positive_alpha: NonNegative = 2.0  # α₊: weight of the positive cache.
    positive_beta: NonNegative = 5.0
    """β₊: how fast an entry's weight falls with its distance."""
    positive_capacity: Count = 3  # Entries per class of the positive cache.
    negative_alpha: NonNegative = 0.117
    """α₋: weight of the negative cache; 0 switches it off."""
    negative_beta: NonNegative = 1.0  # β₋: how fast a negative entry's weight falls.
    negative_capacity: Count = 2  # Entries per class of the negative cache.
    entropy_window: Interval = (0.2, 0.5)
    """Entropy (nats, divided by log2 of the number of classes) between which an image
    enters the negative cache."""
    probability_window: Interval = (0.03, 1.0)
    """Probabilities between which a negative entry counts against a class."""


def most_classes(least: float, classes: int) -> int:
    """Count the probabilities that can be above ``least``: all of them sum to one."""
    if least <= 0:
        return classes
    return min(classes, int((1 + SUM_ROUNDING) / least))


def classes_within(
    probabilities: Tensor, window: tuple[float, float], count: int
) -> Tensor:
    """List classes (B, count), from 1 on, whose probability is in a window; else 0."""
    # the likeliest ones, as many as can be in the window
    low, high = window
    top = probabilities.topk(count)

    # 0 stands for no class
    inside = (top.values > low) & (top.values < high)
    return torch.where(inside, top.indices + 1, 0)


def positive_logits(weights: Affinity, classes: Tensor) -> Tensor:
    """Sum exp(-β(1 - f·k)) over the entries of each class, (B, N).

    ``classes`` (B,) are those of the arriving images.
    """
    N = weights.old.shape[1]
    member = F.one_hot(classes, N).to(weights.new.dtype)

    # entries from before, and of the batch
    return weights.old.sum(dim=2) + weights.new @ member


def negative_logits(weights: Affinity, cached: Tensor, arriving: Tensor) -> Tensor:
    """Sum exp(-β(1 - f·k)) over the entries that count against each class, (B, N).

    ``cached`` (N, K, M) and ``arriving`` (B, M) are the classes of entries and of
    images.
    """
    # (B, N K + B): entries from before and of the batch, each with its classes
    entries = torch.cat([weights.old.flatten(1), weights.new], dim=1)
    classes = torch.cat([cached.flatten(0, 1), arriving])

    # the first column is of no class
    width = len(cached) + 1

    # as a product with the classes of each entry, if that matrix is not too large
    if len(classes) * width <= DENSE:
        member = entries.new_zeros(len(classes), width)
        member.scatter_(1, classes, 1.0)
        return (entries @ member)[:, 1:]

    # else one class of each entry after the other
    sums = entries.new_zeros(len(entries), width)
    for column in classes.unbind(dim=1):
        sums.scatter_add_(1, column.expand_as(entries), entries)
    return sums[:, 1:]


@register(
    "tda", tuned=read_presets("tda", TDAConfig), presets={"views": TDAConfig(views=64)}
)
class TDA(FixedText):
    """Caches of confident and of uncertain test features correct CLIP's logits; no training."""

    batch_dependence = BatchDependence.SEQUENTIAL
    merge_rules = (("positive", "cache"), ("negative", "cache"))
    config: TDAConfig

    def _setup(self) -> None:
        super()._setup()
        config = self.config

        # features of sure images, and of unsure ones
        declare(self.memory, self.classifier, config.positive_capacity, "positive.")
        declare(self.memory, self.classifier, config.negative_capacity, "negative.")

        # the classes that a negative entry counts against
        classes = len(self.prompts)
        most = most_classes(config.probability_window[0], classes)
        against = self.classifier.new_zeros(
            classes, config.negative_capacity, most, dtype=torch.long
        )
        self.memory.declare("negative.classes", against, Range(below=classes + 1))

    def _predict_features(self, features: Tensor) -> Prediction:
        logits = [
            self.replay(self._logits, group)[0]
            for group in torch.split(features, GROUP)
        ]
        return Prediction(torch.cat(logits))

    def _logits(self, features: Tensor) -> tuple[Tensor]:
        """Predict one group (B, V, E), which enters the caches: logits (B, N)."""
        config = self.config
        logits = self.scale * features @ self.classifier.T  # (B, V, N)

        # of several views only the confident ones
        if features.shape[1] > 1:
            index = confident_views(logits, config.selection_fraction)
            features = take_views(features, index)
            logits = take_views(logits, index)
        entropy = marginal_entropy(logits)
        probabilities = logits.softmax(dim=-1).mean(dim=1)

        # the mean of unit features is not normalised again
        features = features.mean(dim=1)
        logits = logits.mean(dim=1)
        classes = logits.argmax(dim=-1)

        # α₊ Σ exp(-β₊(1 - f·k)) over what was predicted as a class
        columns = {"keys": features}
        weights = self._offer(
            "positive.", classes, entropy, columns, beta=config.positive_beta
        )
        logits = logits + config.positive_alpha * positive_logits(weights, classes)

        # images of middle entropy: nats, divided by log2 of the number of classes
        bits = math.log2(len(self.prompts))
        low, high = config.entropy_window
        is_middle = (entropy > low * bits) & (entropy < high * bits)
        entropy = entropy.masked_fill(~is_middle, torch.inf)

        # with the classes that they could be
        cached = self.memory["negative.classes"]
        window = config.probability_window
        columns["classes"] = classes_within(probabilities, window, cached.shape[2])

        # α₋ Σ exp(-β₋(1 - f·k)) over what could be a class
        weights = self._offer(
            "negative.", classes, entropy, columns, beta=config.negative_beta
        )
        negative = negative_logits(weights, cached, columns["classes"])
        logits = logits - config.negative_alpha * negative
        return (logits.float(),)

    def _offer(
        self,
        prefix: str,
        classes: Tensor,
        entropy: Tensor,
        columns: Columns,
        *,
        beta: float,
    ) -> Affinity:
        """Offer images to a cache; weigh its entries for each, itself included."""
        # as the cache was before the batch
        keys = self.memory[f"{prefix}keys"]
        occupancy = insert(self.memory, classes, entropy, columns, prefix)
        return affinity(columns["keys"], keys, occupancy, beta)
