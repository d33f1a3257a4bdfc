"""The cache of Tip-Adapter: its keys, what it says, and the search for its strengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods._shared.config import Count, CropScale, MethodConfig, NonNegative, Rule
from cliquetta.methods._shared.support_set import VIEWS_AT_ONCE, FewShot, crop_features
from cliquetta.model.clip import CLIP, l2_normalize

SearchEnd = Annotated[float, Rule("above 0.1, where the search starts", lambda value: value > 0.1)]


@dataclass(frozen=True)
class TipAdapterConfig(MethodConfig):
    """What the authors start from on ImageNet and three more of their eleven data sets."""

    alpha: NonNegative = 1.17
    """Weight of the cache relative to the text classifier."""
    beta: NonNegative = 1.0
    """Sharpness: how fast the weight of a key falls with its distance."""
    augmentations: Count = 10
    """Random crops whose mean feature makes a key."""
    crop_scale: CropScale = (0.5, 1.0)
    """Fraction of the image's area that a crop covers."""
    search: bool = False
    """Choose alpha and beta by accuracy on the validation split, which must then be given."""
    search_beta: SearchEnd = 7.0
    """Upper end of the search for beta, which starts at 0.1."""
    search_alpha: SearchEnd = 3.0
    """Upper end of the search for alpha, which starts at 0.1."""
    search_steps: tuple[Count, Count] = (200, 20)
    """Number of values tried for beta and for alpha."""


def affinities(features: Tensor, keys: Tensor, beta: float) -> Tensor:
    """exp(-beta (1 - f F^T)): (B, NK) of features (B, E) and keys (NK, E)."""
    return torch.exp(beta * (features @ keys.T - 1))


def tip_logits(
    features: Tensor,
    text_logits: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    alpha: float,
    beta: float,
) -> Tensor:
    """Text logits (B, N) plus alpha times what the cache says; ``values`` (NK, N) are one-hot."""
    return text_logits + alpha * affinities(features, keys, beta) @ values


@torch.no_grad()
def build_keys(
    model: CLIP, few_shot: FewShot, config: TipAdapterConfig, generator: np.random.Generator
) -> Tensor:
    """Unit mean of the raw features of each image's augmentations, (n, E)."""
    features = crop_features(
        model, few_shot, generator, scale=config.crop_scale, count=config.augmentations
    )
    return l2_normalize(features.mean(dim=1))


@dataclass(frozen=True)
class Validation:
    """Features, text logits and labels of the split on which numbers may be chosen."""

    features: Tensor
    text_logits: Tensor
    labels: Tensor

    def accuracy(self, logits: Tensor) -> Tensor:
        """Share of right answers of logits (..., n, N)."""
        return (logits.argmax(dim=-1) == self.labels).float().mean(dim=-1)


@torch.no_grad()
def validation_of(model: CLIP, few_shot: FewShot, classifier: Tensor) -> Validation:
    """The validation split of the examples, encoded; an error says so if there is none."""
    held = few_shot.validation
    if held is None:
        raise UserError(
            "search=True chooses numbers by accuracy and needs a validation split for it: give "
            "FewShot(validation=...), and never the test set"
        )
    parts = np.array_split(np.arange(len(held)), math.ceil(len(held) / VIEWS_AT_ONCE))
    features = torch.cat(
        [model.encode_image(held.pixels(rows, model), normalize=True) for rows in parts]
    )
    return Validation(features, model.scale * features @ classifier.T, held.labels.to(model.device))


@torch.no_grad()
def search_strengths(
    validation: Validation, keys: Tensor, values: Tensor, config: TipAdapterConfig
) -> tuple[float, float]:
    """(alpha, beta) of the best accuracy on the validation split; the first of equals.

    The grid has ``search_steps`` values from 0.1 up to, but without, the ends of the search.
    """
    ends = (config.search_beta, config.search_alpha)
    betas, alphas = (
        [0.1 + i * (end - 0.1) / steps for i in range(steps)]
        for end, steps in zip(ends, config.search_steps, strict=True)
    )
    weights = torch.tensor(alphas, device=keys.device)[:, None, None]
    best, found = -1.0, (config.alpha, config.beta)
    for beta in betas:
        cache = affinities(validation.features, keys, beta) @ values
        scores = validation.accuracy(validation.text_logits + weights * cache)
        first = int((scores == scores.max()).nonzero()[0])
        if float(scores[first]) > best:
            best, found = float(scores[first]), (alphas[first], beta)
    return found


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Values (n, N) of labels (n,), float32."""
    return F.one_hot(labels, classes).float()
