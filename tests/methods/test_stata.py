"""StatA against a numpy version with a loop for every index."""

import numpy as np
import pytest

from cliquetta.methods.stata import StatAConfig, transduce
from tests._helpers.arrays import Array, assert_batch, neighbour_graph, softmax, unit


def numpy_stata(f: Array, prior: Array, text: Array, config: StatAConfig) -> Array:
    """Assignments (B, N) by the update rules as they are printed."""
    B, N = prior.shape
    w = neighbour_graph(f @ f.T, config.neighbours)
    anchor = (
        sum(prior[i, k] * (f[i] - text[k]) ** 2 for i in range(B) for k in range(N)) / B
    )
    mu = text.copy()
    sigma = np.stack([anchor] * N)
    z = prior.copy()
    tau = config.gaussian_temperature
    for updates in range(config.rounds + 1):
        for _ in range(config.inner_steps):
            old = z.copy()
            for i in range(B):
                exponent = np.zeros(N)
                for k in range(N):
                    squared = ((f[i] - mu[k]) ** 2 / sigma[k]).sum() + np.log(
                        sigma[k]
                    ).sum()
                    near = sum((w[i, j] + w[j, i]) * old[j, k] for j in range(B))
                    exponent[k] = -0.5 * squared / tau + near / (2 * config.neighbours)
                z[i] = softmax(np.log(prior[i]) + exponent)
        for k in range(N) if updates < config.rounds else ():
            n = sum(z[i].argmax() == k for i in range(B))
            beta = n / (n + config.anchor_weight)
            v = sum(z[i, k] * f[i] for i in range(B)) / z[:, k].sum()
            mu[k] = unit(beta * unit(v) + (1 - beta) * text[k])
            spread = (
                sum(z[i, k] * (f[i] - mu[k]) ** 2 for i in range(B)) / z[:, k].sum()
            )
            sigma[k] = beta * spread + (1 - beta) * (anchor + (text[k] - mu[k]) ** 2)
            sigma[k] = np.maximum(sigma[k], 1e-6)
    return z


@pytest.mark.parametrize(
    ("images", "config"),
    [
        (24, StatAConfig(rounds=3)),
        (12, StatAConfig(anchor_weight=4.0, neighbours=2, gaussian_temperature=5.0)),
        (2, StatAConfig(rounds=2)),
    ],
)
def test_a_batch_equals_numpy(images: int, config: StatAConfig) -> None:
    assert_batch(numpy_stata, transduce, images, config)
