"""Many views of one image: encoding them, choosing the confident ones, their joint entropy.

Shared by the methods that look at an image more than once (TPT, C-TPT, DART, MTA, Zero, TDA).
Every function takes any number of leading dimensions, so that many images go through at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.types import ViewSpec


@dataclass(frozen=True)
class ViewsConfig:
    """Which views a method looks at, and how many go through the image tower at once."""

    view_count: int = 64
    """Views per image, the plain one included."""
    view_kind: str = "resized-crop"
    """A key of ``cliquetta.data.views.VIEW_KINDS``."""
    zoom: float = 1.15
    """For ``zoom-crop`` only: the shorter side before the crop, in multiples of the input size."""
    chunk: int = 256
    """Views encoded at once. Bounds memory; results do not depend on it."""

    def __post_init__(self) -> None:
        """Check the values at the door."""
        if self.view_count < 1 or self.chunk < 1:
            raise UserError(
                f"view_count and chunk are at least 1, got {self.view_count} and {self.chunk}"
            )

    @property
    def spec(self) -> ViewSpec:
        """What to ask of the stream."""
        return ViewSpec(self.view_kind, self.view_count, self.zoom)


def check_fraction(name: str, value: float) -> None:
    """Refuse a share of views outside (0, 1]."""
    if not 0 < value <= 1:
        raise UserError(f"{name} is a share of the views, above 0 and at most 1, got {value}")


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last dimension."""
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def kept_count(views: int, fraction: float) -> int:
    """How many of ``views`` are kept: the whole number below ``fraction * views``, at least 1."""
    return max(1, math.floor(fraction * views))


def confident_views(logits: Tensor, fraction: float) -> Tensor:
    """Indices (..., K) of the lowest-entropy views of logits (..., V, N), most confident first.

    Of views with equal entropy the earlier one comes first.
    """
    order = entropy(logits).argsort(dim=-1, stable=True)
    return order[..., : kept_count(logits.shape[-2], fraction)]


def take_views(values: Tensor, index: Tensor) -> Tensor:
    """Rows (..., K, X) of ``values`` (..., V, X) at ``index`` (..., K)."""
    return values.gather(-2, index[..., None].expand(*index.shape, values.shape[-1]))


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy (...) of the mean of softmax(logits) over the views of logits (..., K, N).

    The mean is taken of log-probabilities by logsumexp, so that a class without mass adds zero
    and no gradient becomes NaN.
    """
    log_p = logits.log_softmax(dim=-1).logsumexp(dim=-2) - math.log(logits.shape[-2])
    log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    return -(log_p.exp() * log_p).sum(dim=-1)


def mean_logits(logits: Tensor, index: Tensor) -> Tensor:
    """Mean (..., N) of the logits (..., V, N) of the views at ``index`` (..., K)."""
    return take_views(logits, index).mean(dim=-2)


def near_one(cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """``cotangent`` (B, ...) with each row's largest value in [0.5, 1), and the factors used.

    Factors are powers of two: a backward pass in float32 gives the same bits, one in half
    precision neither overflows nor loses small gradients. Divide its result by the factors.
    """
    largest = cotangent.abs().flatten(1).amax(dim=1)
    exponent = torch.frexp(largest).exponent
    factor = torch.ldexp(torch.ones_like(largest), -exponent)
    factor = factor.view(-1, *[1] * (cotangent.ndim - 1))
    return cotangent * factor, factor
