"""Zero: the confident views of an image vote; no training.

Farina et al., Frustratingly Easy Test-Time Adaptation of Vision-Language Models,
NeurIPS 2024. Softmax at temperature zero is one vote per view for its first class; the
votes of the 30 % of the views with the lowest entropy are summed, and the class with
most of them wins. Among tied classes the remaining views decide: the most confident one
whose own prediction is tied, or, if there is none, the most confident one restricted to
the tied classes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.methods.building.config import Fraction
from cliquetta.methods.building.feature_level import FixedText
from cliquetta.methods.building.registry import register
from cliquetta.methods.building.views import (
    SelectiveConfig,
    confident_views,
    selected_count,
    take_views,
)
from cliquetta.types import Prediction

Vote = Literal["hard", "fp16-eps"]
FP16_EPS = 2.0**-10


@dataclass(frozen=True)
class ZeroConfig(SelectiveConfig):
    """Zero with its authors' defaults."""

    selection_fraction: Fraction = 0.3
    """γ: share of the views, of lowest entropy, that vote."""
    vote: Vote = "hard"
    """``hard``: one vote per view, for its first class (the paper); ``fp16-eps``:
    softmax of the cosines at temperature 2^-10 (the official code under autocast)."""


def count_votes(cosines: Tensor, vote: Vote) -> Tensor:
    """Sum the votes of views (B, K, N) for each class, (B, N)."""
    # one vote per view, for its first class
    if vote == "hard":
        predicted = cosines.argmax(dim=-1)
        return F.one_hot(predicted, cosines.shape[-1]).sum(dim=1).float()

    # the official code's: almost one vote
    return (cosines / FP16_EPS).softmax(dim=-1).sum(dim=1)


def decide(votes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the class with most votes; the remaining views decide between tied ones.

    Args:
        votes: (B, N).
        others: Cosines (B, R, N) of the remaining views, most confident first.

    Returns:
        Winners (B,), and which classes are in the tie (B, N).

    """
    # more than one class only in a tie
    tied = votes == votes.amax(dim=-1, keepdim=True)

    # the most confident view whose prediction is tied
    predicted = others.argmax(dim=-1)  # (B, R)
    is_tied = tied.gather(1, predicted)
    first = is_tied.int().argmax(dim=-1, keepdim=True)
    deciding = predicted.gather(1, first)[:, 0]

    # without one, the most confident view among the tied classes
    restricted = others[:, 0].masked_fill(~tied, -torch.inf)
    last_resort = restricted.argmax(dim=-1)

    # without a tie the winner is the only class that is allowed
    winner = torch.where(is_tied.any(dim=-1), deciding, last_resort)
    return winner, tied


def vote_logits(votes: Tensor, winner: Tensor, top: Tensor) -> Tensor:
    """Turn votes into logits (B, N): logarithms of their shares.

    Args:
        votes: (B, N), to which one is added, spread over all classes.
        winner: (B,), which has another one where classes are tied.
        top: Classes with most votes (B, N).

    """
    classes = votes.shape[-1]
    is_tie = top.sum(dim=-1, keepdim=True) > 1

    # one more vote, which decides
    deciding = F.one_hot(winner, classes) * is_tie

    # a class without votes has a finite logarithm
    return (votes + deciding + 1 / classes).log().log_softmax(dim=-1)


def elect(cosines: Tensor, scale: float, config: ZeroConfig) -> tuple[Tensor, Tensor]:
    """Let the views of images vote.

    Args:
        cosines: Of views and classes (B, V, N).
        scale: Of the cosines, for the confidence of views.
        config: Settings.

    Returns:
        Logits and votes (B, N).

    """
    # most confident first
    order = confident_views(scale * cosines, 1.0)
    cosines = take_views(cosines, order)

    # the views that vote
    views = cosines.shape[1]
    count = selected_count(views, config.selection_fraction)

    votes = count_votes(cosines[:, :count], config.vote)

    # the others decide ties, or all if there are no others
    others = cosines[:, count:] if count < views else cosines
    winner, tied = decide(votes, others)
    return vote_logits(votes, winner, tied), votes


@register("zero")
class Zero(FixedText):
    """Lets the confident views of an image vote; no training."""

    config: ZeroConfig

    def _predict_features(self, features: Tensor) -> Prediction:
        cosines = features @ self.classifier.T
        logits, votes = elect(cosines, self.scale, self.config)
        return Prediction(logits, {"votes": votes})
