"""MTA against a plain numpy version of one image's alternation."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from cliquetta.data.views import attach_views
from cliquetta.methods.mta import MTA, MTAConfig, find_mode
from cliquetta.types import Batch
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS
from tests._helpers.tolerance import ADAPTED, FEATURE

Array = npt.NDArray[np.float64]


def numpy_mta(f: Array, s: Array, config: MTAConfig) -> tuple[Array, Array, int]:
    """Mode, inlierness and iterations of one image: features (V, E), predictions (V, N)."""
    V, most = len(f), config.iterations
    h2 = np.empty(V)
    for p in range(V):
        others = sorted(((f[p] - f[q]) ** 2).sum() for q in range(V) if q != p)
        h2[p] = 0.5 * np.mean(others[: int(config.neighbour_fraction * (V - 1))])

    def kernel(m: Array) -> Array:
        return np.exp(-((f - m) ** 2).sum(axis=1) / (2 * h2))

    m, y, iterations = f[0], np.full(V, 1 / V), 0
    for _ in range(most):
        k = kernel(m)
        for _ in range(most):
            iterations += 1
            z = (k + config.affinity_weight * (s @ s.T) @ y) / config.entropy_weight
            old, y = y, np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            if np.linalg.norm(y - old) < config.tolerance:
                break
        for _ in range(most):
            iterations += 1
            w = y * kernel(m)
            old, m = m, (w[:, None] * f).sum(axis=0) / w.sum()
            m = m / np.linalg.norm(m)
            if np.linalg.norm(m - old) < config.tolerance:
                break
    return m, y, iterations


def scattered(images: int, views: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit features around one centre per image, some far off, and predictions for them."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(images, 1, 16, generator=generator)
    spread = torch.rand(images, views, 1, generator=generator) ** 3
    features = centre + 2 * spread * torch.randn(images, views, 16, generator=generator)
    features = torch.nn.functional.normalize(features, dim=-1)
    text = torch.nn.functional.normalize(torch.randn(6, 16, generator=generator), dim=-1)
    return features, (10 * features @ text.T).softmax(dim=-1)


@pytest.mark.parametrize(
    "config",
    [
        MTAConfig(),
        MTAConfig(tolerance=2e-2),  # halves stop early, at different times for different images
        MTAConfig(neighbour_fraction=0.6, affinity_weight=1.0, entropy_weight=0.05, iterations=3),
    ],
)
def test_all_images_at_once_equal_numpy_one_by_one(config: MTAConfig) -> None:
    features, probabilities = scattered(images=6, views=24)
    modes, inlierness = find_mode(features, probabilities, config)
    counts = set()
    for b in range(6):
        mode, y, count = numpy_mta(
            features[b].double().numpy(), probabilities[b].double().numpy(), config
        )
        counts.add(count)
        np.testing.assert_allclose(modes[b].numpy(), mode, atol=FEATURE)
        np.testing.assert_allclose(inlierness[b].numpy(), y, atol=FEATURE)
    if config.tolerance == 2e-2:
        assert len(counts) > 1  # otherwise the masks were not put to the test


def test_the_adapter_scores_the_mode() -> None:
    adapter = MTA(TINY, TINY_PROMPTS, MTAConfig(views=16))
    batch = Batch(TINY_IMAGES[:3], ("a", "b", "c"))
    batch = attach_views(batch, adapter.config.spec, seed=0)
    logits = adapter.predict(batch).logits
    text = TINY.classifier(TINY_PROMPTS).double().numpy()
    assert batch.views is not None
    for b, views in enumerate(batch.views):
        f = TINY.encode_image(views, normalize=True).double().numpy()
        z = TINY.scale * f @ text.T
        s = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        mode, _, _ = numpy_mta(f, s, adapter.config)
        np.testing.assert_allclose(logits[b], TINY.scale * text @ mode, atol=ADAPTED)
