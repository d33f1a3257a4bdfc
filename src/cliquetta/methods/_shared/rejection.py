"""Images of none of the classes: how unsure an answer is, and from where on that is too much.

Both the method and zero-shot CLIP are asked how unsure they are, and the mean counts: adaptation
draws images of no class to the classes, zero-shot CLIP does not follow the domain.

The limit needs no labels. Leave an image's answer out of the class list: what remains does not
name it, so that its score among the remaining classes is one that an image of no class has. The
limit is the score that a wanted share of these exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cliquetta.methods.building.entropy import entropy
from cliquetta.types import Rejection

SOFTENING = 10.0
"""Logits are divided by it: which classes come second and third then counts, too, not only how far
the first one is ahead."""
SHARE = 0.9
"""Share of the left-out scores that exceed the limit."""
WINDOW = 1024
"""Images that the limit is taken from, the latest ones."""
LEFT_OUT = "left_out_scores"
"""The window in a method's memory."""


def rejection_score(logits: Tensor) -> Tensor:
    """Uncertainty (B,) of logits (B, N): entropy when softened, 1 for a mere guess."""
    return entropy(logits.float() / SOFTENING) / math.log(logits.shape[1])


def left_out_score(logits: Tensor) -> Tensor:
    """The scores (B,) with the answer of each image left out of the class list."""
    return rejection_score(logits.sort(dim=1, descending=True).values[:, 1:])


def empty_window() -> Tensor:
    """Left-out scores (WINDOW,) before the first image: infinite where there is none."""
    return torch.full((WINDOW,), torch.inf)


def reject(
    logits: Tensor, zero_shot: Tensor, window: Tensor, share: float, *, learn: bool = True
) -> tuple[Rejection, Tensor]:
    """Images of none of the classes, by logits and plain CLIP's (B, N); also the new window."""
    score = (rejection_score(logits) + rejection_score(zero_shot)) / 2
    if learn:
        left_out = (left_out_score(logits) + left_out_score(zero_shot)) / 2
        window = torch.cat([window, left_out])[-WINDOW:]
    return Rejection(score, score > rejection_limit(window, share)), window


def rejection_limit(window: Tensor, share: float) -> Tensor:
    """The score () that ``share`` of a window's scores exceed."""
    return window[window.isfinite()].quantile(1 - share)


def merge_windows(windows: Sequence[Tensor]) -> Tensor:
    """One window from several: all scores, or evenly spaced ones of them in order."""
    pooled = torch.cat([window[window.isfinite()] for window in windows]).sort().values
    ranks = torch.linspace(0, len(pooled) - 1, min(WINDOW, len(pooled))).long()
    return torch.cat([empty_window().to(pooled), pooled[ranks]])[-WINDOW:]
