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
from cliquetta.methods.building.support_set import VIEWS_AT_ONCE, FewShot, crop_features
from cliquetta.methods.registry import register
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
    crop_scale: CropScale = (
        0.5,
        1.0,
    )  # Fraction of the image's area that a crop covers.
    search: bool = False  # Choose alpha and beta by accuracy on a validation split.
    search_beta: SearchEnd = 7.0
    """Upper end of the search for beta, which starts at 0.1."""
    search_alpha: SearchEnd = 3.0
    """Upper end of the search for alpha, which starts at 0.1."""
    search_steps: tuple[Count, Count] = (
        200,
        20,
    )  # Number of values tried for beta and for alpha.


@dataclass(frozen=True)
class TipAdapterFConfig(TipAdapterConfig):
    """Settings of Tip-Adapter, and of training its keys (AdamW, cosine per step)."""

    epochs: Count = 20  # Passes over the labelled images.
    batch_size: Count = 256  # Images per step.
    lr: Positive = 1e-3  # Learning rate at the start of the cosine schedule.
    eps: Positive = 1e-4  # Epsilon of AdamW.
    weight_decay: NonNegative = 0.01  # Weight decay of AdamW.


PRESETS = read_presets("tip_adapter", TipAdapterConfig)
PRESETS_F = {
    **read_presets("tip_adapter", TipAdapterFConfig),
    **read_presets("tip_adapter_f", TipAdapterFConfig),
}


@dataclass(frozen=True)
class TipCache:
    """Keys F (NK, E), one-hot values L (NK, N), and the strengths of what they add."""

    keys: Tensor
    values: Tensor
    alpha: float
    beta: float

    def votes(self, features: Tensor) -> Tensor:
        """exp(-beta (1 - f F^T)) L: (B, N) of unit features (B, E)."""
        return torch.exp(self.beta * (features @ self.keys.T - 1)) @ self.values

    def logits(self, features: Tensor, text_logits: Tensor) -> Tensor:
        """Text logits (B, N) plus alpha times the votes."""
        return text_logits + self.alpha * self.votes(features)


@torch.no_grad()
def build_keys(
    model: CLIP,
    few_shot: FewShot,
    config: TipAdapterConfig,
    generator: np.random.Generator,
) -> Tensor:
    """Unit mean of the raw features of each image's augmentations, (n, E)."""
    scale, count = config.crop_scale, config.augmentations
    features = crop_features(model, few_shot, generator, scale=scale, count=count)
    return l2_normalize(features.mean(dim=1))


@dataclass(frozen=True)
class Validation:
    """Features, text logits and labels of the split on which numbers may be chosen."""

    features: Tensor
    text_logits: Tensor
    labels: Tensor

    def accuracy(self, logits: Tensor) -> Tensor:
        """Accuracy of logits (..., n, N)."""
        return (logits.argmax(dim=-1) == self.labels).float().mean(dim=-1)

    def accuracy_of(self, cache: TipCache) -> float:
        """Accuracy with a cache beside the text."""
        return float(self.accuracy(cache.logits(self.features, self.text_logits)))


@torch.no_grad()
def encode_validation(
    model: CLIP, split: FewShot | None, classifier: Tensor
) -> Validation:
    """The validation split of the examples, encoded; an error says so if there is none."""
    if split is None:
        raise UserError(
            "search=True chooses numbers by accuracy and needs a validation split for it: give "
            "FewShot(validation=...), and never the test set"
        )
    parts = np.array_split(np.arange(len(split)), math.ceil(len(split) / VIEWS_AT_ONCE))
    pixels = (split.pixels(rows, model) for rows in parts)
    features = torch.cat([model.encode_image(part, normalize=True) for part in pixels])
    text_logits = model.scale * features @ classifier.T
    return Validation(features, text_logits, split.labels.to(model.device))


@torch.no_grad()
def search_strengths(
    validation: Validation, cache: TipCache, config: TipAdapterConfig
) -> tuple[float, float]:
    """(alpha, beta) of the best accuracy on a grid of ``search_steps`` values; first of equals."""
    ends = (config.search_beta, config.search_alpha)
    betas, alphas = (
        [0.1 + i * (end - 0.1) / steps for i in range(steps)]
        for end, steps in zip(ends, config.search_steps, strict=True)
    )
    weights = torch.tensor(alphas, device=cache.keys.device)[:, None, None]
    best, strengths = -1.0, (config.alpha, config.beta)
    for beta in betas:
        votes = replace(cache, beta=beta).votes(validation.features)
        scores = validation.accuracy(validation.text_logits + weights * votes)
        first = int((scores == scores.max()).nonzero()[0])
        if float(scores[first]) > best:
            best, strengths = float(scores[first]), (alphas[first], beta)
    return strengths


def fit_tip_adapter(task: FitTask, config: TipAdapterConfig) -> dict[str, Tensor]:
    """``keys`` (n, E), ``labels`` (n,) and, after a search, ``alpha`` and ``beta``."""
    model, few_shot = task.model, task.few_shot
    classifier = model.classifier(task.prompts)
    split = few_shot.validation
    validation = encode_validation(model, split, classifier) if config.search else None
    generator = np.random.default_rng([task.seed, 0x71])
    labels = few_shot.labels.to(model.device)
    values = F.one_hot(labels, len(task.prompts)).float()
    keys = build_keys(model, few_shot, config, generator)
    cache = TipCache(keys, values, config.alpha, config.beta)
    epochs: Iterable[TipCache] = [cache]
    if isinstance(config, TipAdapterFConfig):
        epochs = train_keys(task, config, cache, generator)
    strengths: dict[str, Tensor] = {}
    if validation is None:
        *_, cache = epochs
    else:
        cache = max(epochs, key=validation.accuracy_of)  # the first of equals
        alpha, beta = search_strengths(validation, cache, config)
        strengths = {"alpha": torch.tensor(alpha), "beta": torch.tensor(beta)}
    return {"keys": cache.keys, "labels": labels, **strengths}


def train_keys(
    task: FitTask,
    config: TipAdapterFConfig,
    cache: TipCache,
    generator: np.random.Generator,
) -> Iterator[TipCache]:
    """The cache after each epoch of AdamW on random crops, whose rate follows a cosine."""
    model, few_shot = task.model, task.few_shot
    classifier = model.classifier(task.prompts)
    labels = few_shot.labels.to(model.device)
    adam = Adam(config.lr, eps=config.eps, weight_decay=config.weight_decay)
    steps = config.epochs * math.ceil(len(few_shot) / config.batch_size)
    state, step = AdamState.begin(cache.keys), 0
    for epoch in range(config.epochs):
        for rows in epoch_batches(
            len(few_shot), config.batch_size, generator, drop_last=False
        ):
            with torch.no_grad():
                pixels = few_shot.crops(
                    rows, model, generator, scale=config.crop_scale
                )[:, 0]
                features = model.encode_image(pixels, normalize=True)
                text_logits = model.scale * features @ classifier.T
            own = labels[torch.from_numpy(rows).to(labels.device)]
            with torch.enable_grad():
                keys = state.values.detach().requires_grad_()
                logits = replace(cache, keys=keys).logits(features, text_logits)
                loss = F.cross_entropy(logits, own)
                (gradient,) = torch.autograd.grad(loss, keys)
            lr = config.lr * (1 + math.cos(math.pi * step / steps)) / 2
            state = adam_step(state, gradient, replace(adam, lr=lr))
            step += 1
            task.report(FitStep(step, steps, epoch, float(loss.detach()), lr))
        yield replace(cache, keys=state.values)


@register("tip_adapter", tuned=PRESETS, fit=fit_tip_adapter)
class TipAdapter(FeatureLevel, FewShotAdapter):
    """A cache of labelled features beside the text classifier; no training."""

    config: TipAdapterConfig

    def _setup(self) -> None:
        keys = self.tensor("keys", None, self.model.embed_dim)
        labels = self.tensor("labels", len(keys))
        if len(labels) and int(labels.max()) >= len(self.prompts):
            raise UserError(
                f"the cache knows class {int(labels.max())}, the class list has "
                f"{len(self.prompts)} names: load it with load_method, or fit again"
            )
        alpha, beta = self.config.alpha, self.config.beta
        if "alpha" in self.fitted:
            alpha, beta = float(self.tensor("alpha")), float(self.tensor("beta"))
        self.cache = TipCache(
            keys, F.one_hot(labels, len(self.prompts)).float(), alpha, beta
        )
        self.classifier = self.model.classifier(self.prompts)

    def _predict_features(self, features: Tensor) -> Prediction:
        plain = features[:, 0]
        return Prediction(
            self.cache.logits(plain, self.model.scale * plain @ self.classifier.T)
        )

    def frozen_model(self) -> FrozenModel:
        """The image tower, the class texts and the cache."""
        return FrozenModel(self.model, self.classifier, head=self.cache.logits)

    @classmethod
    def for_classes(
        cls, fitted: Mapping[str, Tensor], known: Sequence[str], wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """The cache restricted to some of its classes: the others' keys have no value left."""
        rows = cls.indices_of(known, wanted, by="the cache of Tip-Adapter")
        new = torch.full((len(known),), -1, dtype=torch.int64)
        new[rows] = torch.arange(len(rows))
        labels = new[fitted["labels"].cpu()]
        chosen = labels >= 0
        keys = fitted["keys"][chosen.to(fitted["keys"].device)]
        return {**fitted, "keys": keys, "labels": labels[chosen]}


@register("tip_adapter_f", fit=fit_tip_adapter, tuned=PRESETS_F)
class TipAdapterF(TipAdapter):
    """Tip-Adapter with trained keys."""

    config: TipAdapterFConfig
