"""ECALP against a numpy version on one matrix of all texts and images."""

import numpy as np
import pytest

from cliquetta.methods.ecalp import ECALPConfig
from tests._helpers.arrays import Array, assert_stream, softmax, unit


def largest(values: Array, count: int) -> list[int]:
    """Indices of the largest values, the largest first, of equals the first."""
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def graph(nodes: Array, text: Array, config: ECALPConfig) -> Array:
    """Symmetric weights of texts and images: each image chooses images and texts."""
    N = len(text)
    M = len(nodes)
    context = text.var(axis=0)
    w = np.zeros((N + M, N + M))

    for i in range(M):
        # images are compared in the directions in which texts differ
        near = np.zeros(M)
        for j in range(M):
            earlier = nodes[min(i, j)]
            later = nodes[max(i, j)]
            near[j] = unit(earlier * context) @ later
        near_power = np.maximum(near, 0) ** config.gamma
        for j in largest(near, config.image_neighbours):
            w[N + i, N + j] = near_power[j]

        # texts by their cosine
        cosine = text @ nodes[i]
        cosine_power = np.maximum(cosine, 0) ** config.gamma
        for k in largest(cosine, config.text_neighbours):
            w[N + i, k] = cosine_power[k]
    return w + w.T


def numpy_ecalp(images: Array, text: Array, scale: float, config: ECALPConfig) -> Array:
    """Probabilities of a stream of images, one after the other."""
    N, d = text.shape
    identity = np.eye(N)
    unlabelled = np.zeros((1, N))
    seen = np.zeros((0, d))
    start = np.zeros((0, N))
    predictions = []
    for image in images:
        seen = np.concatenate([seen, image[None]])[-config.capacity :]
        start = np.concatenate([start, unlabelled])[-config.capacity :]
        nodes = np.concatenate([seen, image[None]])  # the newest one twice

        # labels spread over the normalised graph; those of texts stay
        w = graph(nodes, text, config)
        root = np.sqrt(np.maximum(w.sum(axis=1), 1e-300))
        s = w / root[:, None] / root[None, :]
        y = np.concatenate([identity, start, unlabelled])
        for _ in range(config.steps):
            spread = s @ y
            y = np.concatenate([identity, spread[N:]])

        own = y[-1] / y[-1].sum()
        zero_shot = softmax(scale * text @ image)
        predictions.append(0.999 * own + 0.001 * zero_shot)

        # images start from a fifth of their label the next time
        start = np.zeros((len(seen), N))
        for i, row in enumerate(y[N:-1]):
            start[i, row.argmax()] = row.max() / 5
    return np.stack(predictions)


@pytest.mark.parametrize(
    "config",
    [
        ECALPConfig(),
        ECALPConfig(capacity=20, image_neighbours=3, steps=5),  # forgets the oldest
        ECALPConfig(gamma=2.0, text_neighbours=9),
    ],
)
@pytest.mark.parametrize("sizes", [[30, 1, 14], [1] * 45])
def test_a_stream_equals_numpy(config: ECALPConfig, sizes: list[int]) -> None:
    assert_stream(numpy_ecalp, "ecalp", config, sizes, moved=0.05)
