"""The cache of Tip-Adapter: its keys, what it says, and the search for its strengths."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods._shared.support_set import VIEWS_AT_ONCE, FewShot, crop_features
from cliquetta.model.clip import CLIP, l2_normalize


@dataclass(frozen=True)
class TipAdapterConfig:
    """What the authors start from on ImageNet and three more of their eleven data sets."""

    alpha: float = 1.17
    """Weight of the cache beside the text classifier."""
    beta: float = 1.0
    """Sharpness: how fast the say of a key falls with its distance."""
    augmentations: int = 10
    """Random crops whose mean feature makes a key."""
    crop_scale: tuple[float, float] = (0.5, 1.0)
    """Share of the image's area that a crop has."""
    search: bool = False
    """Choose alpha and beta by accuracy on the validation split, which must then be given."""
    search_beta: float = 7.0
    """Upper end of the search for beta, which starts at 0.1."""
    search_alpha: float = 3.0
    """Upper end of the search for alpha, which starts at 0.1."""
    search_steps: tuple[int, int] = (200, 20)
    """Values tried for beta and alpha."""

    def __post_init__(self) -> None:
        """Check the values at the door."""
        if self.alpha < 0 or self.beta < 0:
            raise UserError(f"alpha and beta are 0 or more, got {self.alpha} and {self.beta}")
        if self.augmentations < 1 or min(self.search_steps) < 1:
            raise UserError("augmentations and search_steps are at least 1")
        if min(self.search_beta, self.search_alpha) <= 0.1:
            raise UserError("search_beta and search_alpha are above 0.1, where the search starts")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise UserError(f"crop_scale is 0 < low <= high <= 1, got {self.crop_scale}")


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
