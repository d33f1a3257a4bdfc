"""Many views of one image: choosing the confident ones, averaging them.

Shared by the methods that look at an image more than once (TPT, C-TPT, DART, MTA, Zero,
TDA). Every function takes any number of leading dimensions, so that many images go
through at once.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from cliquetta.methods.building.config import Count, Fraction, MethodConfig, Rule
from cliquetta.methods.building.entropy import entropy
from cliquetta.types import ViewSpec

ViewKind = Literal["resized-crop", "zoom-crop", "augmix"]
Zoom = Annotated[float, Rule("at least 1, the input size", lambda value: value >= 1)]


@dataclass(frozen=True)
class ViewsConfig(MethodConfig):
    """Views that a method looks at, and how many go through the image tower at once."""

    views: Count = 64  # Views per image, including the plain one.
    view_kind: ViewKind = "resized-crop"
    """How views are made: ``cliquetta.data.views.VIEW_KINDS``."""
    view_zoom: Zoom = 1.15
    """For ``zoom-crop`` only: shorter side before the crop, as a multiple of the input size."""
    view_min_area: Fraction = 0.08
    """For the other kinds: smallest crop, as a share of the area."""
    chunk: Count = 256
    """Views encoded at once. Bounds memory; results do not depend on it."""

    @property
    def spec(self) -> ViewSpec:
        """Views to ask of the stream."""
        return ViewSpec(self.view_kind, self.views, self.view_zoom, self.view_min_area)


@dataclass(frozen=True)
class SelectiveConfig(ViewsConfig):
    """Views of methods that go on with the most confident ones only."""

    selection_fraction: Fraction = 0.1
    """Share of the views, those of lowest entropy, used."""


def selected_count(views: int, fraction: float) -> int:
    """Count the views to select: ``fraction * views`` rounded down, at least 1."""
    return max(1, math.floor(fraction * views))


def confident_views(logits: Tensor, fraction: float) -> Tensor:
    """Choose the views (..., K) of lowest entropy by logits (..., V, N)."""
    views = logits.shape[-2]
    by_view = entropy(logits)
    order = by_view.argsort(dim=-1, stable=True)
    count = selected_count(views, fraction)
    return order[..., :count]


def take_views(values: Tensor, index: Tensor) -> Tensor:
    """Gather the rows (..., K, X) of ``values`` (..., V, X) at ``index`` (..., K)."""
    # `gather` takes an index for every entry of a row.
    width = values.shape[-1]
    shape = (*index.shape, width)
    whole_rows = index[..., None].expand(shape)
    return values.gather(-2, whole_rows)


def mean_logits(logits: Tensor, index: Tensor) -> Tensor:
    """Average the logits (..., V, N) of the views at ``index`` (..., K)."""
    return take_views(logits, index).mean(dim=-2)


def near_one(cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """Scale rows by powers of two to a largest value in [0.5, 1); return both.

    A backward pass in half precision then neither overflows nor loses small gradients.
    """
    sizes = cotangent.abs().flatten(1)
    largest = sizes.amax(dim=1)

    # largest = mantissa * 2^exponent with a mantissa in [0.5, 1).
    exponent = torch.frexp(largest).exponent
    one = torch.ones_like(largest)
    factor = torch.ldexp(one, -exponent)

    one_per_row = [-1] + [1] * (cotangent.ndim - 1)
    factor = factor.view(one_per_row)
    return cotangent * factor, factor
