"""MTA against a plain numpy version of one image's alternation."""

import numpy as np
import pytest
from torch.nn.functional import normalize

from cliquetta.methods.mta import MTA, MTAConfig, find_mode
from tests._helpers.arrays import Array, softmax, unit
from tests._helpers.tiny_world import TINY, TINY_PROMPTS, draw, with_views
from tests._helpers.tolerance import ADAPTED, FEATURE


def numpy_mta(f: Array, s: Array, config: MTAConfig) -> tuple[Array, Array, int]:
    """Mode, inlierness and iterations of one image: features (V, E), predictions (V, N)."""
    V = len(f)
    most = config.iterations
    # the bandwidth of a view is its mean distance to the nearest others
    neighbours = int(config.neighbour_fraction * (V - 1))
    h2 = np.empty(V)

    for p in range(V):
        others = np.delete(f, p, axis=0)
        squared = sorted(((f[p] - others) ** 2).sum(axis=1))
        h2[p] = 0.5 * np.mean(squared[:neighbours])

    def kernel(m: Array) -> Array:
        squared = ((f - m) ** 2).sum(axis=1)
        return np.exp(-squared / (2 * h2))

    m = f[0]
    y = np.full(V, 1 / V)
    iterations = 0
    for _ in range(most):
        k = kernel(m)
        for _ in range(most):
            iterations += 1
            agreement = config.affinity_weight * (s @ s.T) @ y
            old = y
            y = softmax((k + agreement) / config.entropy_weight)
            if np.linalg.norm(y - old) < config.tolerance:
                break
        for _ in range(most):
            iterations += 1
            w = y * kernel(m)
            old = m
            m = unit((w[:, None] * f).sum(axis=0) / w.sum())
            if np.linalg.norm(m - old) < config.tolerance:
                break
    return m, y, iterations


@pytest.mark.parametrize(
    "config",
    [
        MTAConfig(),
        MTAConfig(
            tolerance=2e-2
        ),  # halves stop early, at different times for different images
        MTAConfig(
            neighbour_fraction=0.6,
            affinity_weight=1.0,
            entropy_weight=0.05,
            iterations=3,
        ),
    ],
)
def test_all_images_at_once_equal_numpy_one_by_one(config: MTAConfig) -> None:
    # Unit features around one centre per image, some far off, and predictions for them.
    images = 6
    centres = draw(images, 1, 16)
    spread = draw(images, 24, 1, seed=1).sigmoid() ** 3
    views = centres + 2 * spread * draw(images, 24, 16, seed=2)
    features = normalize(views.float(), dim=-1)
    text = normalize(draw(6, 16, seed=3).float(), dim=-1)
    probabilities = (10 * features @ text.T).softmax(dim=-1)

    modes, inlierness = find_mode(features, probabilities, config)
    counts = set()
    for image in range(images):
        f = features[image].double().numpy()
        s = probabilities[image].double().numpy()
        mode, y, count = numpy_mta(f, s, config)
        counts.add(count)
        np.testing.assert_allclose(modes[image].numpy(), mode, atol=FEATURE)
        np.testing.assert_allclose(inlierness[image].numpy(), y, atol=FEATURE)

    if config.tolerance == 2e-2:
        assert len(counts) > 1  # otherwise the masks were not put to the test


def test_the_adapter_scores_the_mode() -> None:
    adapter = MTA(TINY, TINY_PROMPTS, MTAConfig(views=16))
    batch = with_views(3, adapter.config.spec)
    logits = adapter.predict(batch).logits

    text = TINY.classifier(TINY_PROMPTS).double().numpy()
    for actual, views in zip(logits, batch.views, strict=True):
        # features of the views and their zero-shot predictions
        features = TINY.encode_image(views, normalize=True)
        f = features.double().numpy()
        s = softmax(TINY.scale * f @ text.T)

        mode, _, _ = numpy_mta(f, s, adapter.config)
        cosines = text @ mode
        expected = TINY.scale * cosines
        np.testing.assert_allclose(actual, expected, atol=ADAPTED)
