"""Entropies against scipy, selection against sorting, encoding against one view at a time."""

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.special import softmax
from torch import Tensor

from cliquetta.data.views import attach_views
from cliquetta.methods.building.views import confident_views, near_one, selected_count
from cliquetta.model.clip import encode_views
from cliquetta.types import Batch, ViewSpec
from tests._helpers.tiny_world import TINY, TINY_IMAGES
from tests._helpers.tolerance import FEATURE


@pytest.fixture
def logits() -> Tensor:
    return 5 * torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))


def test_kept_views_are_rounded_down_and_never_none() -> None:
    assert [selected_count(64, 0.1), selected_count(64, 0.3), selected_count(64, 1.0)] == [
        6,
        19,
        64,
    ]
    assert [selected_count(9, 0.1), selected_count(1, 0.3)] == [1, 1]


def test_confident_views_are_those_of_lowest_entropy(logits: Tensor) -> None:
    chosen = confident_views(logits, 0.5)
    entropies = scipy.stats.entropy(softmax(logits.double().numpy(), axis=-1), axis=-1)
    np.testing.assert_array_equal(chosen.numpy(), entropies.argsort(axis=-1)[:, :4])


def test_of_equally_confident_views_the_earlier_comes_first() -> None:
    logits = torch.tensor([0.0, 3.0]).repeat(1, 40, 1)
    assert confident_views(logits, 0.1).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_views_of_many_images_are_encoded_together_in_bounded_parts(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(TINY_IMAGES[:3], ("a", "b", "c"))
    views = attach_views(batch, ViewSpec("resized-crop", 5), seed=0).views
    assert views is not None
    expected = torch.stack([TINY.encode_image(v, normalize=True) for v in views])
    plain, seen = TINY.encode_image, []

    def spy(pixels: Tensor, **options: Any) -> Tensor:
        seen.append(len(pixels))
        return plain(pixels, **options)

    monkeypatch.setattr(TINY, "encode_image", spy)
    features = encode_views(TINY, views, chunk=chunk)
    torch.testing.assert_close(features, expected, atol=FEATURE, rtol=0)
    assert sum(seen) == 15
    assert max(seen) == min(chunk, 15)


def test_cotangents_are_scaled_by_powers_of_two() -> None:
    cotangent = torch.tensor([[3e-9, -1e-9], [700.0, 5.0], [0.0, 0.0]])
    scaled, factor = near_one(cotangent)
    largest = scaled.abs().amax(dim=1)
    assert ((largest[:2] >= 0.5) & (largest[:2] < 1)).all()
    assert torch.equal(scaled / factor, cotangent)
    assert torch.equal(factor.log2(), factor.log2().round())
    assert torch.equal(scaled[2], torch.zeros(2))
