"""ECALP against a numpy version on one matrix of all texts and images."""

import numpy as np
import pytest

from cliquetta.methods.ecalp import ECALPConfig
from tests._helpers.arrays import Array, assert_stream, softmax, unit


def numpy_ecalp(images: Array, text: Array, scale: float, config: ECALPConfig) -> Array:
    """Probabilities of a stream of images, one after the other."""
    N, d = text.shape
    seen = np.zeros((0, d))
    start = np.zeros((0, N))
    predictions = []
    context = text.var(axis=0)
    for image in images:
        seen = np.concatenate([seen, image[None]])[-config.capacity :]
        start = np.concatenate([start, np.zeros((1, N))])[-config.capacity :]
        nodes = np.concatenate([seen, image[None]])  # the newest one twice
        M = len(nodes)
        w = np.zeros((N + M, N + M))
        for i in range(M):
            near = [
                unit(nodes[min(i, j)] * context) @ nodes[max(i, j)] for j in range(M)
            ]
            for j in sorted(range(M), key=lambda j: -near[j])[
                : config.image_neighbours
            ]:
                w[N + i, N + j] = max(0.0, near[j]) ** config.gamma
            cosine = text @ nodes[i]
            for k in sorted(range(N), key=lambda k: -cosine[k])[
                : config.text_neighbours
            ]:
                w[N + i, k] = max(0.0, cosine[k]) ** config.gamma
        w = w + w.T
        root = np.sqrt(np.maximum(w.sum(axis=1), 1e-300))
        s = w / root[:, None] / root[None, :]
        y = np.concatenate([np.eye(N), start, np.zeros((1, N))])
        for _ in range(config.steps):
            y = np.concatenate([np.eye(N), (s @ y)[N:]])
        own = y[-1] / y[-1].sum()
        predictions.append(0.999 * own + 0.001 * softmax(scale * text @ image))
        start = np.zeros((M - 1, N))
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
