"""TransCLIP against a numpy version with a loop for every index."""

import numpy as np
import pytest
import torch

from cliquetta.methods.registry import create_method
from cliquetta.methods.transclip import TransCLIPConfig, transduce, update_variance
from tests._helpers.arrays import Array, assert_batch, neighbour_graph, softmax, unit
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS


def numpy_transclip(
    f: Array, prior: Array, text: Array, config: TransCLIPConfig
) -> Array:
    """Assignments (B, N) by the update rules as they are printed; the prior stands for the text."""
    (B, N) = prior.shape
    E = f.shape[1]
    w = neighbour_graph(f @ f.T, config.neighbours)
    mu = np.zeros((N, E))
    for k in range(N):
        best = sorted(range(B), key=lambda i: -prior[i, k])[: config.init_images]
        mu[k] = unit(sum(prior[i, k] * f[i] for i in best))
    variance = np.full(E, 1 / E)
    z = prior.copy()
    tau = config.gaussian_temperature
    for step in range(config.rounds + 1):
        for _ in range(config.inner_steps):
            old = z.copy()
            for i in range(B):
                exponent = np.zeros(N)
                for k in range(N):
                    likelihood = -0.5 * ((f[i] - mu[k]) ** 2 / variance).sum()
                    near = sum((w[i, j] + w[j, i]) * old[j, k] for j in range(B))
                    exponent[k] = (
                        likelihood + tau / (2 * config.neighbours) * near
                    ) / tau
                z[i] = softmax(config.text_weight * np.log(prior[i]) + exponent)
        if step == config.rounds:
            break
        for k in range(N):
            mu[k] = unit(sum(z[i, k] * f[i] for i in range(B)))
        residual = sum(
            z[i, k] * (f[i] - mu[k]) ** 2 for i in range(B) for k in range(N)
        )
        variance = np.maximum(residual / B, 1e-6)
    return z


@pytest.mark.parametrize(
    ("images", "config"),
    [
        (30, TransCLIPConfig(rounds=3)),
        (
            12,
            TransCLIPConfig(0.5, gaussian_temperature=5.0, neighbours=2, init_images=3),
        ),
        (3, TransCLIPConfig(rounds=2)),  # fewer than the neighbours asked for
        (2, TransCLIPConfig(rounds=2)),
    ],
)
def test_a_batch_equals_numpy(images: int, config: TransCLIPConfig) -> None:
    assert_batch(numpy_transclip, transduce, images, config)


def test_one_image_alone_keeps_its_zero_shot_prediction() -> None:
    prediction = (
        create_method("transclip", TINY, TINY_PROMPTS)
        .predict(TINY_IMAGES[:1])
        .probabilities
    )
    plain = (
        create_method("zero_shot", TINY, TINY_PROMPTS)
        .predict(TINY_IMAGES[:1])
        .probabilities
    )
    torch.testing.assert_close(prediction, plain)


def test_equal_images_leave_no_variance_to_divide_by() -> None:
    feature = torch.nn.functional.normalize(torch.ones(1, 24), dim=-1).expand(6, -1)
    prior = torch.tensor([0.5, 0.3, 0.2]).log().expand(6, -1)
    logs = transduce(feature, prior, feature[:3], TransCLIPConfig())
    assert logs.isfinite().all()
    assert (logs.argmax(dim=-1) == 0).all()
    assert update_variance(feature, feature[:3], prior.exp()).min() >= 1e-6
