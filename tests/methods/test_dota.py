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
    mu = np.full((N, d), 1e-3)
    c = np.ones(N)
    sigma = [config.initial_variance * np.eye(d) for _ in range(N)]
    predictions = []
    for views in images:
        p = softmax(scale * views @ text.T)
        used = surest(p, config.selection_fraction)
        views = views[used]
        p = p[used]
        f = views.mean(axis=0)
        shared = (1 - config.shrinkage) * sum(sigma) / N + config.shrinkage * np.eye(d)
        inverse = np.linalg.inv(shared)
        density = np.array([f @ inverse @ m - 0.5 * m @ inverse @ m for m in mu])
        weight = min(
            config.weight_per_count * c.mean() / len(views), config.largest_weight
        )
        predictions.append(softmax(scale * text @ f + weight * density))
        for k in range(N):
            total = c[k] + p[:, k].sum()
            centred = views - mu[k]
            outer = sum(
                q * np.outer(v, v) for q, v in zip(p[:, k], centred, strict=True)
            )
            sigma[k] = (c[k] * sigma[k] + outer) / total
            mu[k] = (c[k] * mu[k] + p[:, k] @ views) / total
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
    ],
)
@pytest.mark.parametrize("sizes", [[50, 1, 9], [1] * 60])
def test_a_stream_equals_numpy(
    config: DOTAConfig, views: int, sizes: list[int]
) -> None:
    assert_stream(numpy_dota, "dota", config, sizes, views=views, moved=0.05)
