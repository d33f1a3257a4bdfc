"""MOON against a numpy version of Algorithm 1 with loops over images and classes."""

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


def fitted_lengths(f: Array, prior: Array, text: Array) -> Array:
    """Lengths of the class means that fit the prior, with the texts for directions."""
    lengths = np.zeros(len(text))
    for k, direction in enumerate(text):
        mass = prior[:, k]
        share = mass / mass.sum()
        difference = f - direction
        squared = (difference**2).sum(axis=1)
        mean = share @ squared
        lengths[k] = 1 - mean / 2
    return lengths


def numpy_moon(f: Array, prior: Array, text: Array, config: MOONConfig) -> Array:
    """Assignments (B, N); comments give the numbered lines of Algorithm 1."""
    B, N = prior.shape
    d = f.shape[1]
    # 1
    z = prior.copy()
    # 2
    lengths = fitted_lengths(f, prior, text)
    mu = text.copy()
    # 3
    omega = neighbour_graph(f @ f.T, config.neighbours)
    # 4
    presence = prior.mean(axis=0) * prior.max(axis=0)
    alpha = 1 / np.sqrt(presence)

    for _ in range(config.rounds):
        # 13
        r = np.clip(lengths, SHORTEST, LONGEST)
        kappa = (d * r - r**3) / (1 - r**2)
        # 7, 8
        volume = (d - 1) / 2 * np.log(kappa) - kappa
        old = z.copy()
        for i in range(B):
            log_p = kappa * (mu @ f[i]) + volume
            near = np.zeros(N)
            for j in range(B):
                near += omega[i, j] * old[j]
            z[i] = softmax(np.log(prior[i]) + log_p + near)
        # 9
        safe = np.maximum(z, 1e-300)
        entropy = -(z * np.log(safe)).sum(axis=1)
        gamma = 1 - entropy / np.log(N)
        # 10 to 12
        for k in range(N):
            n = gamma[z.argmax(axis=1) == k].sum()
            beta = n / (n + alpha[k])
            weights = gamma * safe[:, k]
            v = weights @ f / weights.sum()
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
    rest = 1 - 0.3**2 - 0.8**2
    text = torch.eye(E).double()[:2]
    images = torch.zeros(n + 1, E).double()
    images[:n, 0] = 0.3
    images[n, 1] = 0.3
    images[:, 2] = 0.8
    images[:, 3 : n + 4] = rest**0.5 * torch.eye(n + 1).double()
    logs = (100 * images @ text.T).log_softmax(dim=1)

    def log_likelihood(length: float, cosine: float) -> float:
        kappa = (E * length - length**3) / (1 - length**2)  # eq. (15)
        return kappa * (cosine - 1) + (E - 1) / 2 * math.log(kappa)

    # β = n / (n + 1 / λ), λ = √(share · 1)
    rare = 1 / (1 + (1 / 16) ** -0.5)
    many = n / (n + (n / 16) ** -0.5)

    # means: along the text, along what all share, and along what images have alone
    rare_along_text = 0.3 * rare + (1 - rare)
    rare_length = math.hypot(rare_along_text, rare * math.sqrt(1 - 0.3**2))
    rare_cosine = (rare + 0.3 * (1 - rare)) / rare_length

    many_along_text = 0.3 * many + (1 - many)
    many_along_shared = 0.8 * many
    many_alone = many * math.sqrt(rest / n)
    many_length = math.hypot(many_along_text, many_along_shared, many_alone)
    many_cosine = 0.8 * many_along_shared / many_length

    likelihood_of_many = log_likelihood(many_length, many_cosine)
    likelihood_of_rare = log_likelihood(rare_length, rare_cosine)
    gap = likelihood_of_many - likelihood_of_rare

    assert gap > 500  # against the 30 of the texts

    weight = 1 / class_presence(logs.exp())
    means = shrunk_means(images, logs, text, weight)
    length = means.norm(dim=1)
    directions = means / length[:, None]
    kappa = concentration(length, E)
    many_likelihood, rare_likelihood = vmf_log_likelihood(images, directions, kappa)[-1]

    assert float(many_likelihood - rare_likelihood) == pytest.approx(gap, rel=1e-6)

    before = logs.argmax(dim=1)
    assert before.tolist() == [0] * n + [1]

    assigned = transduce(images, logs, text, MOONConfig()).argmax(dim=1)
    assert assigned.tolist() == [0] * n + [0]


def test_it_gains_where_few_classes_are_present() -> None:
    """The paper's claim: 40 classes to choose from, two of them in each batch."""
    gains = []
    for seed in range(5):
        features, labels, text = make_clusters(1600, classes=40, seed=seed, spread=0.8)
        # thirty images of each of two classes
        first = (labels == 3).nonzero()[:30, 0]
        second = (labels == 11).nonzero()[:30, 0]
        rows = torch.cat([first, second])
        batch = features[rows]
        truth = labels[rows]

        adapted = on_features("moon", text).predict_features(batch).logits
        zero_shot = batch @ text.T
        right = adapted.argmax(dim=-1) == truth
        right_before = zero_shot.argmax(dim=-1) == truth
        gain = right.float().mean() - right_before.float().mean()
        gains.append(float(gain))
    assert np.mean(gains) > 0.05
