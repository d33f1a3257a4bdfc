"""StatA against a numpy version with loops over images and classes."""

import numpy as np
import pytest

from cliquetta.methods.stata import StatAConfig, transduce
from tests._helpers.arrays import Array, assert_batch, neighbour_graph, softmax, unit


def numpy_stata(f: Array, prior: Array, text: Array, config: StatAConfig) -> Array:
    """Assignments (B, N) by the update rules as they are printed."""
    B, N = prior.shape
    graph = neighbour_graph(f @ f.T, config.neighbours)
    w = graph + graph.T
    tau = config.gaussian_temperature

    # the anchor's variance: that of all images around all texts
    anchor = np.zeros(f.shape[1])
    for k in range(N):
        anchor += prior[:, k] @ (f - text[k]) ** 2 / B
    mu = text.copy()
    sigma = np.stack([anchor] * N)

    def assign(z: Array) -> Array:
        """Assignments after those of an inner step."""
        near = w @ z / (2 * config.neighbours)
        new = np.zeros_like(z)
        for i in range(B):
            # classes as Gaussians with a variance of their own
            likelihood = np.zeros(N)
            for k in range(N):
                difference = f[i] - mu[k]
                squared = difference**2 / sigma[k]
                volume = np.log(sigma[k])
                likelihood[k] = -0.5 * (squared + volume).sum()

            # beside the text and the neighbours
            exponent = likelihood / tau + near[i]
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
            share = z[:, k] / z[:, k].sum()
            mean = unit(share @ f)
            mu[k] = unit(beta * mean + (1 - beta) * text[k])
            spread = share @ (f - mu[k]) ** 2
            around_text = anchor + (text[k] - mu[k]) ** 2
            variance = beta * spread + (1 - beta) * around_text
            sigma[k] = np.maximum(variance, 1e-6)
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
