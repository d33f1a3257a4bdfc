"""MOON against a numpy version of Algorithm 1 with a loop for every index."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cliquetta.methods.moon import (
    LONGEST,
    SHORTEST,
    MOONConfig,
    class_presence,
    shrunk_means,
    transduce,
)
from cliquetta.model.clip import CLIP
from tests._helpers.clusters import make_clusters
from tests._helpers.literal_numpy import Array, neighbour_graph, on_features, softmax, unit
from tests._helpers.tolerance import STEP


def numpy_moon(f: Array, prior: Array, text: Array, config: MOONConfig) -> Array:
    """Assignments (B, N); comments give the numbered lines of Algorithm 1."""
    (B, N), d = prior.shape, f.shape[1]
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
            log_p = [
                kappa[k] * (mu[k] @ f[i]) + (d - 1) / 2 * np.log(kappa[k]) - kappa[k]
                for k in range(N)
            ]
            near = [sum(omega[i, j] * old[j, k] for j in range(B)) for k in range(N)]
            z[i] = softmax(np.log(prior[i]) + np.array(log_p) + np.array(near))
        safe = np.maximum(z, 1e-300)
        gamma = 1 + (z * np.log(safe)).sum(axis=1) / np.log(N)  # 9
        for k in range(N):  # 10 to 12
            n = sum(gamma[i] for i in range(B) if z[i].argmax() == k)
            beta = n / (n + alpha[k])
            weights = gamma * safe[:, k]
            v = (weights[:, None] * f).sum(axis=0) / weights.sum()
            mean = beta * v + (1 - beta) * text[k]
            mu[k], lengths[k] = unit(mean), np.linalg.norm(mean)
    return z


@pytest.mark.parametrize(
    ("images", "config"),
    [(24, MOONConfig(rounds=4)), (12, MOONConfig(neighbours=2)), (2, MOONConfig(rounds=2))],
)
def test_a_batch_equals_numpy(images: int, config: MOONConfig) -> None:
    features, _, text = (x.double() if x.is_floating_point() else x for x in make_clusters(images))
    prior = (10 * features @ text.T).softmax(dim=-1)
    expected = numpy_moon(features.numpy(), prior.numpy(), text.numpy(), config)
    ours = transduce(features, prior.log(), text, config).exp()
    np.testing.assert_allclose(ours.numpy(), expected, atol=STEP)
    assert np.abs(expected - prior.numpy()).max() > 0.02


def test_presence_and_shrinkage_by_hand() -> None:
    """λ = √(mean · largest), eq. (11); β = n / (n + 1 / λ), eqs. (10) and (14)."""
    prior = torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.6, 0.0]])
    presence = class_presence(prior)
    torch.testing.assert_close(
        presence, torch.tensor([(0.65 * 0.9) ** 0.5, (0.35 * 0.6) ** 0.5, 0])
    )
    sure = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    images, text = torch.eye(5)[:3], torch.eye(5)[3:]
    means = shrunk_means(images, sure.clamp_min(1e-12).log(), text, torch.tensor([2.0, 3.0]))
    first = torch.tensor([0.25, 0.25, 0, 0.5, 0])  # two images weigh as much as α = 2
    second = torch.tensor([0, 0, 0.25, 0, 0.75])
    torch.testing.assert_close(means, torch.stack([first, second]), atol=1e-5, rtol=0)


def test_a_class_without_images_stays_at_its_text() -> None:
    features, _, text = make_clusters(20)
    logs = torch.tensor([0.7, 0.2, 0.1, 1e-9, 1e-9]).log().expand(20, -1)
    means = shrunk_means(features, logs, text, torch.full((5,), 2.0))
    torch.testing.assert_close(means[1:], text[1:])  # all images are assigned to class 0
    assert not torch.allclose(means[0], text[0], atol=0.1)


def test_it_gains_where_few_classes_are_present(tiny_clip: CLIP) -> None:
    """The paper's claim: 40 classes to choose from, two of them in each batch."""
    gains = []
    for seed in range(5):
        features, labels, text = make_clusters(1600, classes=40, seed=seed, spread=0.8)
        rows = torch.cat([(labels == c).nonzero()[:30, 0] for c in (3, 11)])
        moon = on_features(tiny_clip, "moon", text)
        right = moon.predict_features(features[rows]).logits.argmax(dim=-1) == labels[rows]
        plain = (features[rows] @ text.T).argmax(dim=-1) == labels[rows]
        gains.append(float(right.float().mean() - plain.float().mean()))
    assert np.mean(gains) > 0.05
