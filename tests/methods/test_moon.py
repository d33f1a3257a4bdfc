"""MOON against a numpy version of Algorithm 1 with a loop for every index."""

import math

import numpy as np
import pytest
import torch

from cliquetta.methods.moon import (
    LONGEST,
    SHORTEST,
    MOONConfig,
    class_presence,
    concentration,
    shrunk_means,
    transduce,
    vmf_log_likelihood,
)
from tests._helpers.arrays import (
    Array,
    assert_batch,
    neighbour_graph,
    on_features,
    softmax,
    unit,
)
from tests._helpers.clusters import make_clusters


def numpy_moon(f: Array, prior: Array, text: Array, config: MOONConfig) -> Array:
    """Assignments (B, N); comments give the numbered lines of Algorithm 1."""
    (B, N) = prior.shape
    d = f.shape[1]
    z = prior.copy()  # 1
    lengths = np.zeros(N)
    for k in range(N):  # 2
        squared = sum(z[i, k] * ((f[i] - text[k]) ** 2).sum() for i in range(B))
        lengths[k] = 1 - squared / (2 * z[:, k].sum())
    mu = text.copy()
    omega = neighbour_graph(f @ f.T, config.neighbours)  # 3
    alpha = [1 / np.sqrt(prior[:, k].mean() * prior[:, k].max()) for k in range(N)]  # 4
    for _ in range(config.rounds):
        r = np.clip(lengths, SHORTEST, LONGEST)
        kappa = (d * r - r**3) / (1 - r**2)  # 13
        old = z.copy()
        for i in range(B):  # 7, 8
            log_p = kappa * (mu @ f[i]) + (d - 1) / 2 * np.log(kappa) - kappa
            near = [sum(omega[i, j] * old[j, k] for j in range(B)) for k in range(N)]
            z[i] = softmax(np.log(prior[i]) + log_p + np.array(near))
        safe = np.maximum(z, 1e-300)
        gamma = 1 + (z * np.log(safe)).sum(axis=1) / np.log(N)  # 9
        for k in range(N):  # 10 to 12
            n = sum(gamma[i] for i in range(B) if z[i].argmax() == k)
            beta = n / (n + alpha[k])
            weights = gamma * safe[:, k]
            v = (weights[:, None] * f).sum(axis=0) / weights.sum()
            mean = beta * v + (1 - beta) * text[k]
            mu[k] = unit(mean)
            lengths[k] = np.linalg.norm(mean)
    return z


@pytest.mark.parametrize(
    ("images", "config"),
    [
        (24, MOONConfig(rounds=4)),
        (12, MOONConfig(neighbours=2)),
        (2, MOONConfig(rounds=2)),
    ],
)
def test_a_batch_equals_numpy(images: int, config: MOONConfig) -> None:
    assert_batch(numpy_moon, transduce, images, config)


def test_a_class_with_one_sure_image_loses_it_by_hand() -> None:
    """Eq. (14) where all classes occur in unequal numbers.

    Fifteen images of one class and one of another, of zero-shot margin 30, in 512
    dimensions: all share 0.8 of a direction, 0.3 of their text and a rest of their own.
    The mean of the rare class is mostly its text, which has length 1: long, so that κ
    is large and its own image, at a cosine of 0.5, far off.
    """
    E = 512
    n = 15
    text = torch.eye(E).double()[:2]
    images = torch.zeros(n + 1, E).double()
    images[:n, 0] = 0.3
    images[n, 1] = 0.3
    images[:, 2] = 0.8
    images[torch.arange(n + 1), 3 + torch.arange(n + 1)] = (1 - 0.3**2 - 0.8**2) ** 0.5
    logs = (100 * images @ text.T).log_softmax(dim=1)

    def log_likelihood(length: float, cosine: float) -> float:
        kappa = (E * length - length**3) / (1 - length**2)  # eq. (15)
        return kappa * (cosine - 1) + (E - 1) / 2 * math.log(kappa)

    # β: λ = √(share · 1)
    rare = 1 / (1 + (1 / 16) ** -0.5)
    many = n / (n + (n / 16) ** -0.5)
    own = math.sqrt((0.3 * rare + 1 - rare) ** 2 + (1 - 0.09) * rare**2)
    shared = (0.3 * many + 1 - many, 0.8 * many, many * math.sqrt(0.27 / n))
    other = math.sqrt(sum(x * x for x in shared))
    gap = log_likelihood(other, 0.8 * shared[1] / other) - log_likelihood(
        own, (rare + 0.3 * (1 - rare)) / own
    )
    assert gap > 500  # against the 30 of the texts
    weight = 1 / class_presence(logs.exp())
    means = shrunk_means(images, logs, text, weight)
    length = means.norm(dim=1)
    likelihood = vmf_log_likelihood(
        images[-1:], means / length[:, None], concentration(length, E)
    )
    assert float(likelihood[0, 0] - likelihood[0, 1]) == pytest.approx(gap, rel=1e-6)
    assigned = transduce(images, logs, text, MOONConfig()).argmax(dim=1)
    assert logs.argmax(dim=1).tolist() == [0] * n + [1]
    assert assigned.tolist() == [0] * (n + 1)


def test_it_gains_where_few_classes_are_present() -> None:
    """The paper's claim: 40 classes to choose from, two of them in each batch."""
    gains = []
    for seed in range(5):
        features, labels, text = make_clusters(1600, classes=40, seed=seed, spread=0.8)
        rows = torch.cat([(labels == c).nonzero()[:30, 0] for c in (3, 11)])
        moon = on_features("moon", text)
        right = (
            moon.predict_features(features[rows]).logits.argmax(dim=-1) == labels[rows]
        )
        plain = (features[rows] @ text.T).argmax(dim=-1) == labels[rows]
        gains.append(float(right.float().mean() - plain.float().mean()))
    assert np.mean(gains) > 0.05
