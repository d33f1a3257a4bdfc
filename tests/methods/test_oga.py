"""OGA against a numpy version with lists for caches and explicit densities."""

import numpy as np
import pytest
import torch

from cliquetta.methods.oga import OGAConfig, cache_means, ridge_covariance
from tests._helpers.arrays import (
    Array,
    assert_stream,
    entropies,
    insert,
    on_features,
    softmax,
)
from tests._helpers.clusters import make_clusters
from tests._helpers.tiny_world import draw
from tests._helpers.tolerance import ADAPTED, FEATURE


def numpy_oga(
    batches: list[Array], text: Array, scale: float, config: OGAConfig
) -> Array:
    """Posteriors of a stream of batches."""
    N, d = text.shape
    identity = np.eye(d)
    cache: list[list[tuple[Array, Array]]] = [[] for _ in range(N)]
    predictions = []
    for batch in batches:
        # images enter the cache of their class
        prior = softmax(scale * batch @ text.T)
        for f, p in zip(batch, prior, strict=True):
            entries = cache[int(p.argmax())]
            insert(entries, (entropies(p), f), config.capacity)

        # a class of two images or more has their mean, others their text
        mu = text.copy()
        rest = []
        for k, entries in enumerate(cache):
            features = [f for _, f in entries]
            if len(features) >= 2:
                by_capacity = config.divisor == "capacity"
                divisor = config.capacity if by_capacity else len(features)
                mu[k] = sum(features) / divisor
            rest += [f - mu[k] for f in features]

        # one covariance for all classes, shrunk to its mean variance
        inverse = d * identity
        if max(len(entries) for entries in cache) > 2:
            M = np.cov(np.array(rest).T)
            freedom = len(rest) - 1
            shrunk = freedom * M + np.trace(M) * identity
            inverse = d * np.linalg.inv(shrunk)

        # predictions are weighed with the density of each class
        for f, p in zip(batch, prior, strict=True):
            distances = [(f - m) @ inverse @ (f - m) for m in mu]
            log_density = -0.5 * np.array(distances)
            z = p * softmax(config.likelihood_weight * log_density)
            predictions.append(z / z.sum())
    return np.stack(predictions)


@pytest.mark.parametrize(
    "config",
    [
        OGAConfig(),
        OGAConfig(divisor="entries"),
        OGAConfig(capacity=3, likelihood_weight=0.5),
    ],
)
def test_a_stream_equals_numpy(config: OGAConfig) -> None:
    sizes = [4, 1, 60, 25]

    def literal(stream: Array, text: Array, scale: float, config: OGAConfig) -> Array:
        ends = np.cumsum(sizes)[:-1]
        batches = np.split(stream, ends)
        return numpy_oga(batches, text, scale, config)

    assert_stream(literal, "oga", config, sizes, moved=0.02)


def test_a_full_cache_is_inverted_without_shrinkage() -> None:
    """More entries than four times the width."""
    keys = draw(5, 12, 6)
    filled = torch.ones(5, 12, dtype=torch.bool)
    filled[2, 9:] = False
    text = torch.zeros(5, 6).double()
    config = OGAConfig(capacity=12, divisor="entries")
    means = cache_means(keys, filled, text, config)
    covariance = ridge_covariance(keys, filled, means).numpy()

    rest = (keys - means[:, None])[filled].numpy()
    expected = np.cov(rest.T)

    np.testing.assert_allclose(covariance, expected, rtol=ADAPTED, atol=FEATURE)


def test_equal_images_leave_no_spread_to_divide_by() -> None:
    _, _, text = make_clusters(1)
    oga = on_features("oga", text)
    nine_times_the_first_text = text[:1].expand(9, -1)
    logits = oga.predict_features(nine_times_the_first_text).logits

    assert logits.isfinite().all()
    assert logits.argmax(dim=-1).tolist() == [0] * 9
