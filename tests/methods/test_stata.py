"""StatA against a numpy version with loops over images and classes."""

import numpy as np
import pytest

from cliquetta.methods.stata import StatAConfig, transduce
from tests._helpers.arrays import Array, assert_batch, neighbour_graph, softmax, unit


def numpy_stata(f: Array, prior: Array, text: Array, config: StatAConfig) -> Array:
    """Assignments (B, N) by the update rules as they are printed."""
    B, N = prior.shape
    w = neighbour_graph(f @ f.T, config.neighbours)
    tau = config.gaussian_temperature

    # the anchor's variance: that of all images around all texts
    anchor = np.zeros(f.shape[1])
    for i in range(B):
        for k in range(N):
            anchor += prior[i, k] * (f[i] - text[k]) ** 2 / B
    mu = text.copy()
    sigma = np.stack([anchor] * N)

    def assign(z: Array) -> Array:
        """Assignments after those of an inner step."""
        new = np.zeros_like(z)
        for i in range(B):
            exponent = np.zeros(N)
            for k in range(N):
                squared = ((f[i] - mu[k]) ** 2 / sigma[k]).sum()
                volume = np.log(sigma[k]).sum()
                near = (w[i] + w[:, i]) @ z[:, k]
                likelihood = -0.5 * (squared + volume) / tau
                exponent[k] = likelihood + near / (2 * config.neighbours)
            new[i] = softmax(np.log(prior[i]) + exponent)
        return new

    z = prior.copy()

    for updates in range(config.rounds + 1):
        for _ in range(config.inner_steps):
            z = assign(z)
        if updates == config.rounds:
            break
        # means and variances between those of the images and those of the anchor
        for k in range(N):
            n = (z.argmax(axis=1) == k).sum()
            beta = n / (n + config.anchor_weight)
            total = z[:, k].sum()
            v = z[:, k] @ f / total
            mu[k] = unit(beta * unit(v) + (1 - beta) * text[k])
            spread = z[:, k] @ (f - mu[k]) ** 2 / total
            around_text = anchor + (text[k] - mu[k]) ** 2
            sigma[k] = beta * spread + (1 - beta) * around_text
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
