"""TransCLIP against a numpy version with loops over images and classes."""

import numpy as np
import pytest
import torch

from cliquetta.methods.building.registry import create_method
from cliquetta.methods.transclip import TransCLIPConfig, transduce, update_variance
from tests._helpers.arrays import Array, assert_batch, neighbour_graph, softmax, unit
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS


def numpy_transclip(
    f: Array, prior: Array, text: Array, config: TransCLIPConfig
) -> Array:
    """Assignments (B, N) by the update rules as they are printed; the prior stands for the text."""
    B, N = prior.shape
    E = f.shape[1]
    graph = neighbour_graph(f @ f.T, config.neighbours)
    w = graph + graph.T
    tau = config.gaussian_temperature

    # means start from the likeliest images of each class
    mu = np.zeros((N, E))

    for k in range(N):
        order = np.argsort(-prior[:, k], kind="stable")
        best = order[: config.init_images]
        mu[k] = unit(prior[best, k] @ f[best])

    variance = np.full(E, 1 / E)

    def assign(z: Array) -> Array:
        """Assignments after those of an inner step."""
        near = w @ z / (2 * config.neighbours)
        new = np.zeros_like(z)
        for i in range(B):
            # classes as Gaussians around their means
            likelihood = np.zeros(N)
            for k in range(N):
                squared = (f[i] - mu[k]) ** 2
                likelihood[k] = -0.5 * (squared / variance).sum()
            text_part = config.text_weight * np.log(prior[i])
            new[i] = softmax(text_part + likelihood / tau + near[i])
        return new

    z = prior.copy()
    for step in range(config.rounds + 1):
        for _ in range(config.inner_steps):
            z = assign(z)
        if step == config.rounds:
            break
        # one variance for all classes, around their new means
        residual = np.zeros(E)
        for k in range(N):
            mu[k] = unit(z[:, k] @ f)
            residual += z[:, k] @ (f - mu[k]) ** 2
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
    image = TINY_IMAGES[:1]
    transclip = create_method("transclip", TINY, TINY_PROMPTS)
    zero_shot = create_method("zero_shot", TINY, TINY_PROMPTS)
    expected = zero_shot.predict(image).probabilities

    torch.testing.assert_close(transclip.predict(image).probabilities, expected)


def test_equal_images_leave_no_variance_to_divide_by() -> None:
    feature = torch.full((1, 24), 24**-0.5)
    images = feature.expand(6, -1)
    texts = feature.expand(3, -1)
    prior = torch.tensor([0.5, 0.3, 0.2]).expand(6, -1)

    logs = transduce(images, prior.log(), texts, TransCLIPConfig())
    assert logs.isfinite().all()
    assert logs.argmax(dim=-1).tolist() == [0] * 6

    variance = update_variance(images, texts, prior)
    assert variance.min() >= 1e-6
