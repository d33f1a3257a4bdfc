"""Tip-Adapter and Tip-Adapter-F: a cache of labelled features beside the text classifier.

Zhang et al., "Tip-Adapter: Training-free Adaption of CLIP for Few-shot Classification", ECCV 2022.
Keys F are the features of the labelled images (mean of ten augmentations, then unit length), values
L their one-hot labels, W the text classifier. With a unit image feature f,

    logits = scale * f W^T + alpha * exp(-beta (1 - f F^T)) L.

Tip-Adapter-F goes on to train the keys by cross-entropy; W and L stay.

Written from the paper. The official code takes scale = 100; ours is the model's own, which is 100
for the released CLIPs. It chooses alpha, beta and, for the F version, the epoch by accuracy: on
ImageNet by that of the test set, on other sets by that of a validation set. Ours chooses nothing
unless ``search`` is set, and then on the validation split of the examples; a test set has no way
in. Crops are bilinear and of the preprocessed picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods._shared.config import Count, NonNegative, Positive
from cliquetta.methods._shared.feature_level import FeatureLevel
from cliquetta.methods._shared.few_shot import (
    FewShotAdapter,
    FitStep,
    OnStep,
    epoch_batches,
    finite,
    places_of,
)
from cliquetta.methods._shared.presets import read_presets
from cliquetta.methods._shared.support_set import FewShot
from cliquetta.methods._shared.tip_cache import (
    TipAdapterConfig,
    Validation,
    build_keys,
    one_hot,
    search_strengths,
    tip_logits,
    validation_of,
)
from cliquetta.methods.base import BatchDependence
from cliquetta.methods.registry import register
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Prediction

PAPER = "Zhang et al., Tip-Adapter: Training-free Adaption of CLIP, ECCV 2022"


@dataclass(frozen=True)
class TipAdapterFConfig(TipAdapterConfig):
    """The same, and how the keys are trained (AdamW, cosine per step)."""

    epochs: Count = 20
    """Passes over the labelled images."""
    batch_size: Count = 256
    """Images per step."""
    lr: Positive = 1e-3
    """Learning rate at the start of the cosine schedule."""
    eps: Positive = 1e-4
    """Epsilon of AdamW."""
    weight_decay: NonNegative = 0.01
    """Weight decay of AdamW."""


PRESETS = read_presets("tip_adapter", TipAdapterConfig)
PRESETS_F = {
    **read_presets("tip_adapter", TipAdapterFConfig),
    **read_presets("tip_adapter_f", TipAdapterFConfig),
}


def fit_tip_adapter(
    model: CLIP,
    prompts: ClassPrompts,
    few_shot: FewShot,
    config: TipAdapterConfig,
    *,
    seed: int,
    on_step: OnStep | None = None,
) -> dict[str, Tensor]:
    """``keys`` (n, E), ``labels`` (n,) and, after a search, ``alpha`` and ``beta``."""
    del on_step  # nothing is trained
    classifier = model.classifier(prompts)
    validation = validation_of(model, few_shot, classifier) if config.search else None
    keys = build_keys(model, few_shot, config, np.random.default_rng([seed, 0x71]))
    return _fitted(keys, few_shot.labels.to(model.device), len(prompts), validation, config)


def fit_tip_adapter_f(
    model: CLIP,
    prompts: ClassPrompts,
    few_shot: FewShot,
    config: TipAdapterFConfig,
    *,
    seed: int,
    on_step: OnStep | None = None,
) -> dict[str, Tensor]:
    """As :func:`fit_tip_adapter`, with keys that were trained; they need not have unit length."""
    classifier = model.classifier(prompts)
    validation = validation_of(model, few_shot, classifier) if config.search else None
    generator = np.random.default_rng([seed, 0x71])
    labels = few_shot.labels.to(model.device)
    values = one_hot(labels, len(prompts))
    start = build_keys(model, few_shot, config, generator)
    passes = _train(model, classifier, few_shot, config, start, generator, on_step)
    best, kept = -1.0, start
    for keys in passes:
        score = _score(validation, keys, values, config)
        if validation is None or score > best:
            best, kept = score, keys
    return _fitted(kept, labels, len(prompts), validation, config)


def _train(
    model: CLIP,
    classifier: Tensor,
    few_shot: FewShot,
    config: TipAdapterFConfig,
    start: Tensor,
    generator: np.random.Generator,
    on_step: OnStep | None,
) -> Iterator[Tensor]:
    """The keys after each epoch of AdamW on random crops."""
    keys = start.clone().requires_grad_()
    labels = few_shot.labels.to(model.device)
    values = one_hot(labels, len(classifier))
    optimiser = torch.optim.AdamW(
        [keys], lr=config.lr, eps=config.eps, weight_decay=config.weight_decay
    )
    steps = config.epochs * math.ceil(len(few_shot) / config.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    step = 0
    for epoch in range(config.epochs):
        for rows in epoch_batches(len(few_shot), config.batch_size, generator, drop_last=False):
            with torch.no_grad():
                pixels = few_shot.crops(rows, model, generator, scale=config.crop_scale)[:, 0]
                features = model.encode_image(pixels, normalize=True)
            own = labels[torch.from_numpy(rows).to(labels.device)]
            with torch.enable_grad():
                loss = key_loss(model, classifier, features, keys, values, own, config)
                (keys.grad,) = torch.autograd.grad(loss, keys)
            lr = optimiser.param_groups[0]["lr"]
            optimiser.step()
            schedule.step()
            step += 1
            now = finite(float(loss.detach()), step)
            if on_step is not None:
                on_step(FitStep(step, steps, epoch, now, lr))
        yield keys.detach().clone()


def key_loss(
    model: CLIP,
    classifier: Tensor,
    features: Tensor,
    keys: Tensor,
    values: Tensor,
    labels: Tensor,
    config: TipAdapterConfig,
) -> Tensor:
    """Cross-entropy of the logits of unit image features (B, E), as a function of the keys."""
    text_logits = model.scale * features @ classifier.T
    logits = tip_logits(features, text_logits, keys, values, alpha=config.alpha, beta=config.beta)
    return F.cross_entropy(logits, labels)


def _score(
    validation: Validation | None, keys: Tensor, values: Tensor, config: TipAdapterConfig
) -> float:
    """Accuracy on the validation split, if there is one."""
    if validation is None:
        return 0.0
    logits = tip_logits(
        validation.features,
        validation.text_logits,
        keys,
        values,
        alpha=config.alpha,
        beta=config.beta,
    )
    return float(validation.accuracy(logits))


def _fitted(
    keys: Tensor,
    labels: Tensor,
    classes: int,
    validation: Validation | None,
    config: TipAdapterConfig,
) -> dict[str, Tensor]:
    """The tensors of both versions."""
    tensors = {"keys": keys, "labels": labels}
    if validation is not None:
        alpha, beta = search_strengths(validation, keys, one_hot(labels, classes), config)
        tensors |= {"alpha": torch.tensor(alpha), "beta": torch.tensor(beta)}
    return tensors


@register(
    "tip_adapter",
    config=TipAdapterConfig,
    summary="a cache of labelled features beside the text classifier; no training",
    paper=PAPER,
    presets=PRESETS,
    tuned_by_authors=frozenset(PRESETS),
    fit=fit_tip_adapter,
)
class TipAdapter(FeatureLevel, FewShotAdapter):
    """logits = scale * f W^T + alpha * exp(-beta (1 - f F^T)) L.

    ``alpha`` and ``beta`` are those that a search found, if there was one, else the config's.
    """

    batch_dependence = BatchDependence.INDEPENDENT

    def __init__(
        self,
        model: CLIP,
        prompts: ClassPrompts,
        config: TipAdapterConfig,
        *,
        seed: int = 0,
        fitted: Mapping[str, Tensor],
    ) -> None:
        super().__init__(model, prompts, config, seed=seed, fitted=fitted)
        self.keys = self.tensor("keys", None, model.embed_dim)
        labels = self.tensor("labels", len(self.keys))
        if len(labels) and int(labels.max()) >= len(prompts):
            raise UserError(
                f"the cache knows class {int(labels.max())}, the class list holds {len(prompts)} "
                "names: load it with create_fitted, or fit again"
            )
        self.values = one_hot(labels, len(prompts))
        self.alpha, self.beta = config.alpha, config.beta
        if "alpha" in fitted:
            self.alpha, self.beta = float(self.tensor("alpha")), float(self.tensor("beta"))
        self.classifier = model.classifier(prompts)

    def _predict_features(self, features: Tensor) -> Prediction:
        return Prediction(self.classify(features[:, 0]))

    def classify(self, features: Tensor) -> Tensor:
        """Logits (B, N) of unit image features (B, E)."""
        text_logits = self.model.scale * features @ self.classifier.T
        return tip_logits(
            features, text_logits, self.keys, self.values, alpha=self.alpha, beta=self.beta
        )

    @classmethod
    def for_classes(
        cls, fitted: Mapping[str, Tensor], known: Sequence[str], wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """The cache restricted to some of its classes: the others' keys have no value left."""
        places = places_of(known, wanted, by="the cache of Tip-Adapter")
        new = torch.full((len(known),), -1, dtype=torch.int64)
        new[places] = torch.arange(len(places))
        labels = new[fitted["labels"].cpu()]
        kept = labels >= 0
        keys = fitted["keys"][kept.to(fitted["keys"].device)]
        return {**fitted, "keys": keys, "labels": labels[kept]}


@register(
    "tip_adapter_f",
    config=TipAdapterFConfig,
    summary="Tip-Adapter with trained keys",
    paper=PAPER,
    presets=PRESETS_F,
    tuned_by_authors=frozenset(PRESETS_F),
    fit=fit_tip_adapter_f,
)
class TipAdapterF(TipAdapter):
    """Tip-Adapter whose keys were trained."""
