"""Tip-Adapter and Tip-Adapter-F: a cache of labelled features beside the text classifier.

Zhang et al., Tip-Adapter: Training-free Adaption of CLIP for Few-shot Classification,
ECCV 2022. Keys F are the features of the labelled images (mean of ten augmentations,
then unit length), values L their one-hot labels, W the text classifier. With a unit
image feature f,

    logits = scale * f W^T + alpha * exp(-beta (1 - f F^T)) L.

Tip-Adapter-F goes on to train the keys by cross-entropy; W and L stay.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.adam import Adam, AdamState, adam_step
from cliquetta.methods.building.config import (
    Count,
    CropScale,
    MethodConfig,
    NonNegative,
    Positive,
    Rule,
    read_presets,
)
from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.building.few_shot import (
    FewShotAdapter,
    FitStep,
    FitTask,
    epoch_batches,
)
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.support_set import VIEWS_AT_ONCE, FewShot, crop_features
from cliquetta.model.clip import CLIP, FrozenModel, l2_normalize
from cliquetta.types import Prediction

SearchEnd = Annotated[
    float, Rule("above 0.1, where the search starts", lambda value: value > 0.1)
]


@dataclass(frozen=True)
class TipAdapterConfig(MethodConfig):
    """The authors' setting for ImageNet and three more of their eleven datasets."""

    alpha: NonNegative = 1.17  # Weight of the cache relative to the text classifier.
    beta: NonNegative = 1.0
    """Sharpness: how fast the weight of a key falls with its distance."""
    augmentations: Count = 10  # Random crops whose mean feature makes a key.
    crop_scale: CropScale = (0.5, 1.0)
    """Fraction of the image's area that a crop covers."""
    search: bool = False  # Choose alpha and beta by accuracy on a validation split.
    search_beta: SearchEnd = 7.0
    """Upper end of the search for beta, which starts at 0.1."""
    search_alpha: SearchEnd = 3.0
    """Upper end of the search for alpha, which starts at 0.1."""
    search_steps: tuple[Count, Count] = (200, 20)
    """Number of values tried for beta and for alpha."""


@dataclass(frozen=True)
class TipAdapterFConfig(TipAdapterConfig):
    """Settings of Tip-Adapter, and of training its keys (AdamW, cosine per step)."""

    epochs: Count = 20  # Passes over the labelled images.
    batch_size: Count = 256  # Images per step.
    lr: Positive = 1e-3  # Learning rate at the start of the cosine schedule.
    eps: Positive = 1e-4  # Epsilon of AdamW.
    weight_decay: NonNegative = 0.01  # Weight decay of AdamW.


@dataclass(frozen=True)
class TipCache:
    """Labelled features: keys F (NK, E), one-hot values L (NK, N), their strengths."""

    keys: Tensor
    values: Tensor
    alpha: float
    beta: float

    def votes(self, features: Tensor) -> Tensor:
        """Return exp(-beta (1 - f F^T)) L, (B, N), of unit features (B, E)."""
        closeness = torch.exp(self.beta * (features @ self.keys.T - 1))
        return closeness @ self.values

    def logits(self, features: Tensor, text_logits: Tensor) -> Tensor:
        """Add alpha times the votes to text logits (B, N)."""
        return text_logits + self.alpha * self.votes(features)


@torch.no_grad()
def build_keys(
    model: CLIP,
    few_shot: FewShot,
    config: TipAdapterConfig,
    generator: np.random.Generator,
) -> Tensor:
    """Average the raw features of each image's augmentations: unit keys (n, E)."""
    features = crop_features(
        model,
        few_shot,
        generator,
        scale=config.crop_scale,
        count=config.augmentations,
    )
    return l2_normalize(features.mean(dim=1))


@dataclass(frozen=True)
class Validation:
    """Split on which numbers may be chosen: its features, text logits and labels."""

    features: Tensor
    text_logits: Tensor
    labels: Tensor

    def accuracy(self, logits: Tensor) -> Tensor:
        """Return the accuracy (...) of logits (..., n, N)."""
        is_right = logits.argmax(dim=-1) == self.labels
        return is_right.float().mean(dim=-1)

    def accuracy_of(self, cache: TipCache) -> float:
        """Return the accuracy with a cache beside the text."""
        logits = cache.logits(self.features, self.text_logits)
        return float(self.accuracy(logits))


@torch.no_grad()
def encode_validation(
    model: CLIP, split: FewShot | None, classifier: Tensor
) -> Validation:
    """Encode the validation split of the examples, which there must be."""
    if split is None:
        raise UserError(
            "search=True chooses numbers by accuracy and needs a validation split for "
            "it: give FewShot(validation=...), and never the test set"
        )
    parts = math.ceil(len(split) / VIEWS_AT_ONCE)
    encoded = []
    for rows in np.array_split(np.arange(len(split)), parts):
        pixels = split.pixels(rows, model)
        encoded.append(model.encode_image(pixels, normalize=True))
    features = torch.cat(encoded)
    text_logits = model.scale * features @ classifier.T
    return Validation(features, text_logits, split.labels.to(model.device))


@torch.no_grad()
def search_strengths(
    validation: Validation, cache: TipCache, config: TipAdapterConfig
) -> tuple[float, float]:
    """Choose (alpha, beta) of the best accuracy on a grid; the first of equals."""
    beta_steps, alpha_steps = config.search_steps
    betas = _search_values(config.search_beta, beta_steps)
    alphas = _search_values(config.search_alpha, alpha_steps)

    # all alphas at once, for one beta after the other
    weights = torch.tensor(alphas, device=cache.keys.device)[:, None, None]
    found = []
    for beta in betas:
        votes = replace(cache, beta=beta).votes(validation.features)
        accuracy = validation.accuracy(validation.text_logits + weights * votes)

        # the first of the best alphas
        best = int((accuracy == accuracy.max()).nonzero()[0])
        found.append((float(accuracy[best]), alphas[best], beta))

    # and of the best betas
    _, alpha, beta = max(found, key=lambda entry: entry[0])
    return alpha, beta


def _search_values(end: float, steps: int) -> list[float]:
    """Return evenly spaced values from 0.1 on, below ``end``."""
    return [0.1 + i * (end - 0.1) / steps for i in range(steps)]


def fit_tip_adapter(task: FitTask, config: TipAdapterConfig) -> dict[str, Tensor]:
    """Fit ``keys`` (n, E), ``labels`` (n,); with a search ``alpha`` and ``beta``."""
    model = task.model
    few_shot = task.few_shot
    validation = None
    if config.search:
        classifier = model.classifier(task.prompts)
        validation = encode_validation(model, few_shot.validation, classifier)

    # the cache of labelled features
    generator = np.random.default_rng([task.seed, 0x71])
    labels = few_shot.labels.to(model.device)
    values = F.one_hot(labels, len(task.prompts)).float()
    keys = build_keys(model, few_shot, config, generator)
    cache = TipCache(keys, values, config.alpha, config.beta)

    # Tip-Adapter-F goes on to train the keys
    epochs: Iterable[TipCache] = [cache]
    if isinstance(config, TipAdapterFConfig):
        epochs = train_keys(task, config, cache, generator)

    # the last epoch, or by accuracy the first of the best
    if validation is None:
        *_, cache = epochs
        return {"keys": cache.keys, "labels": labels}
    cache = max(epochs, key=validation.accuracy_of)
    alpha, beta = search_strengths(validation, cache, config)
    return {
        "keys": cache.keys,
        "labels": labels,
        "alpha": torch.tensor(alpha),
        "beta": torch.tensor(beta),
    }


def train_keys(
    task: FitTask,
    config: TipAdapterFConfig,
    cache: TipCache,
    generator: np.random.Generator,
) -> Iterator[TipCache]:
    """Yield the cache after each epoch of AdamW on random crops, at a cosine rate."""
    model = task.model
    few_shot = task.few_shot
    images = len(few_shot)
    classifier = model.classifier(task.prompts)
    adam = Adam(config.lr, eps=config.eps, weight_decay=config.weight_decay)
    state = AdamState.begin(cache.keys)
    step = 0
    steps = config.epochs * math.ceil(images / config.batch_size)
    for epoch in range(config.epochs):
        for rows in epoch_batches(
            images, config.batch_size, generator, drop_last=False
        ):
            # one crop of each image, seen by the frozen tower
            with torch.no_grad():
                crops = few_shot.crops(rows, model, generator, scale=config.crop_scale)
                features = model.encode_image(crops[:, 0], normalize=True)
                text_logits = model.scale * features @ classifier.T

            # cross-entropy, by the keys alone: W and L stay
            labels = few_shot.labels[torch.from_numpy(rows)].to(model.device)
            with torch.enable_grad():
                keys = state.values.detach().requires_grad_()
                logits = replace(cache, keys=keys).logits(features, text_logits)
                loss = F.cross_entropy(logits, labels)
                (gradient,) = torch.autograd.grad(loss, keys)

            # the cosine goes on at every step
            lr = config.lr * (1 + math.cos(math.pi * step / steps)) / 2
            state = adam_step(state, gradient, replace(adam, lr=lr))
            step += 1

            # progress, and a refusal of a loss that is not finite
            task.report(FitStep(step, steps, epoch, float(loss.detach()), lr))

        # after the epoch
        yield replace(cache, keys=state.values)


@register(
    "tip_adapter",
    tuned=read_presets("tip_adapter", TipAdapterConfig),
    fit=fit_tip_adapter,
)
class TipAdapter(FeatureLevel, FewShotAdapter):
    """A cache of labelled features beside the text classifier; no training."""

    config: TipAdapterConfig

    def _setup(self) -> None:
        classes = len(self.prompts)
        keys = self.tensor("keys", None, self.model.embed_dim)
        labels = self.tensor("labels", len(keys))
        if len(labels) and int(labels.max()) >= classes:
            raise UserError(
                f"the cache knows class {int(labels.max())}, the class list has "
                f"{classes} names: load it with load_method, or fit again"
            )
        values = F.one_hot(labels, classes).float()

        # strengths that a search has found precede those of the config
        alpha = self.config.alpha
        beta = self.config.beta
        if "alpha" in self.fitted:
            alpha = float(self.tensor("alpha"))
            beta = float(self.tensor("beta"))
        self.cache = TipCache(keys, values, alpha, beta)
        self.classifier = self.model.classifier(self.prompts)

    def _predict_features(self, features: Tensor) -> Prediction:
        # the plain view alone
        plain = features[:, 0]
        text_logits = self.model.scale * plain @ self.classifier.T
        return Prediction(self.cache.logits(plain, text_logits))

    def frozen_model(self) -> FrozenModel:
        """Freeze the image tower, the class texts and the cache."""
        return FrozenModel(self.model, self.classifier, head=self.cache.logits)

    @classmethod
    def for_classes(
        cls, fitted: Mapping[str, Tensor], known: Sequence[str], wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """Restrict the cache to keys of some of its classes."""
        rows = cls.indices_of(known, wanted, by="the cache of Tip-Adapter")

        # by old label the new one, -1 for classes that are left out
        renumbered = torch.full((len(known),), -1, dtype=torch.int64)
        renumbered[rows] = torch.arange(len(rows))
        labels = renumbered[fitted["labels"].cpu()]

        # keys and labels of the classes that stay
        stay = labels >= 0
        keys = fitted["keys"]
        keys = keys[stay.to(keys.device)]
        return {**fitted, "keys": keys, "labels": labels[stay]}


@register(
    "tip_adapter_f",
    tuned=read_presets("tip_adapter", TipAdapterFConfig)
    | read_presets("tip_adapter_f", TipAdapterFConfig),
    fit=fit_tip_adapter,
)
class TipAdapterF(TipAdapter):
    """Tip-Adapter with trained keys."""

    config: TipAdapterFConfig
