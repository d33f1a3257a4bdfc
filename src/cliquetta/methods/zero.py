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
from cliquetta.methods.building.views import (
    SelectiveConfig,
    confident_views,
    selected_count,
    take_views,
)
from cliquetta.methods.registry import register
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
    """Votes (B, N) of views (B, K, N)."""
    if vote == "hard":
        return F.one_hot(cosines.argmax(dim=-1), cosines.shape[-1]).sum(dim=1).float()
    return (cosines / FP16_EPS).softmax(dim=-1).sum(dim=1)


def decide(votes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Winners (B,) of votes (B, N), ties by cosines ``others`` (B, R, N); classes in a tie."""
    top = votes == votes.amax(dim=-1, keepdim=True)
    predicted = others.argmax(dim=-1)  # (B, R)
    allowed = top.gather(1, predicted)
    first = allowed.int().argmax(dim=-1, keepdim=True)
    last_resort = others[:, 0].masked_fill(~top, -torch.inf).argmax(dim=-1)
    winner = torch.where(
        allowed.any(dim=-1), predicted.gather(1, first)[:, 0], last_resort
    )
    return winner, top


def vote_logits(votes: Tensor, winner: Tensor, top: Tensor) -> Tensor:
    """Logarithm (B, N) of the shares of votes, one of them spread over all classes."""
    tied = top.sum(dim=-1, keepdim=True) > 1
    deciding = F.one_hot(winner, votes.shape[-1]) * tied
    return (votes + deciding + 1 / votes.shape[-1]).log().log_softmax(dim=-1)


def elect(cosines: Tensor, scale: float, config: ZeroConfig) -> tuple[Tensor, Tensor]:
    """Logits (B, N) and votes (B, N) of images whose views have cosines (B, V, N)."""
    cosines = take_views(
        cosines, confident_views(scale * cosines, 1.0)
    )  # most confident first
    V = cosines.shape[1]
    count = selected_count(V, config.selection_fraction)
    votes = count_votes(cosines[:, :count], config.vote)
    winner, top = decide(votes, cosines[:, count:] if count < V else cosines)
    return vote_logits(votes, winner, top), votes


@register("zero")
class Zero(FixedText):
    """Lets the confident views of an image vote; no training."""

    config: ZeroConfig

    def _predict_features(self, features: Tensor) -> Prediction:
        logits, votes = elect(features @ self.classifier.T, self.scale, self.config)
        return Prediction(logits, {"votes": votes})
