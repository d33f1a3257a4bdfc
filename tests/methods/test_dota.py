"""DOTA against a numpy version that adds one outer product after the other."""

from typing import Any

import numpy as np
import pytest

from cliquetta.methods.dota import DOTAConfig
from tests._helpers.arrays import Array, assert_stream, softmax, surest

HEAVY: dict[str, Any] = {"weight_per_count": 0.05}


def numpy_dota(images: Array, text: Array, scale: float, config: DOTAConfig) -> Array:
    """Probabilities of a stream of images (n, V, d), one after the other."""
    N, d = text.shape
    identity = np.eye(d)
    mu = np.full((N, d), 1e-3)
    c = np.ones(N)
    sigma = [config.initial_variance * identity for _ in range(N)]
    predictions = []
    for views in images:
        # the surest views, and their mean
        p = softmax(scale * views @ text.T)
        used = surest(p, config.selection_fraction)
        views = views[used]
        p = p[used]
        f = views.mean(axis=0)

        # density of the mean view under one covariance for all classes
        pooled = sum(sigma) / N
        shared = (1 - config.shrinkage) * pooled + config.shrinkage * identity
        inverse = np.linalg.inv(shared)
        density = np.zeros(N)
        for k, m in enumerate(mu):
            projected = inverse @ m
            density[k] = f @ projected - 0.5 * m @ projected
        per_view = config.weight_per_count * c.mean() / len(views)
        weight = min(per_view, config.largest_weight)
        zero_shot = scale * text @ f
        predictions.append(softmax(zero_shot + weight * density))

        # every class learns from every view, by its probability
        for k in range(N):
            share = p[:, k]
            total = c[k] + share.sum()
            outer = np.zeros((d, d))
            for q, v in zip(share, views - mu[k], strict=True):
                outer += q * np.outer(v, v)
            sigma[k] = (c[k] * sigma[k] + outer) / total
            mu[k] = (c[k] * mu[k] + share @ views) / total
            c[k] = total
    return np.stack(predictions)


@pytest.mark.parametrize(
    ("config", "views"),
    [
        (DOTAConfig(**HEAVY, largest_weight=0.8), 1),
        (
            DOTAConfig(
                **HEAVY, largest_weight=2, shrinkage=0.01, initial_variance=0.05
            ),
            1,
        ),
        (DOTAConfig(views=20, selection_fraction=0.2, weight_per_count=0.5), 20),
        # a weight that stays below its largest
        (DOTAConfig(views=20, selection_fraction=0.2, weight_per_count=1e-3), 20),
    ],
)
@pytest.mark.parametrize("sizes", [[50, 1, 9], [1] * 60])
def test_a_stream_equals_numpy(
    config: DOTAConfig, views: int, sizes: list[int]
) -> None:
    assert_stream(numpy_dota, "dota", config, sizes, views=views, moved=0.05)
