"""DOTA against a numpy version that adds one outer product after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cliquetta.methods.dota import DOTAConfig
from cliquetta.model.clip import CLIP
from tests._helpers.clusters import gains_over_text, make_clusters
from tests._helpers.literal_numpy import Array, on_features, softmax
from tests._helpers.tolerance import LOGIT


def numpy_dota(batches: list[Array], text: Array, scale: float, config: DOTAConfig) -> Array:
    """Probabilities of a stream of batches."""
    N, d = text.shape
    mu, c = text.copy(), np.ones(N)
    scatter = N * config.initial_variance * np.eye(d)
    seen, answers = 0, []
    for batch in batches:
        p = softmax(scale * batch @ text.T)
        for i, f in enumerate(batch):
            for k in range(N):
                scatter = scatter + p[i, k] * np.outer(f - mu[k], f - mu[k])
        mu = np.stack([(c[k] * mu[k] + p[:, k] @ batch) / (c[k] + p[:, k].sum()) for k in range(N)])
        c, seen = c + p.sum(axis=0), seen + len(batch)
        sigma = (1 - config.shrinkage) * scatter / c.sum() + config.shrinkage * np.eye(d)
        inverse = np.linalg.inv(sigma)
        weight = min(config.weight_per_image * seen, config.largest_weight)
        for f in batch:
            density = np.array([-0.5 * (f - m) @ inverse @ (f - m) for m in mu])
            answers.append(softmax(scale * text @ f + weight * density))
    return np.stack(answers)


@pytest.mark.parametrize(
    "config",
    [DOTAConfig(), DOTAConfig(shrinkage=0.01, initial_variance=0.05, largest_weight=2.0)],
)
@pytest.mark.parametrize("sizes", [[50, 1, 9], [1] * 60])
def test_a_stream_equals_numpy(tiny_clip: CLIP, config: DOTAConfig, sizes: list[int]) -> None:
    features, _, text = make_clusters(60)
    parts = features.split(sizes)
    arrays = [part.double().numpy() for part in parts]
    expected = numpy_dota(arrays, text.double().numpy(), tiny_clip.scale, config)
    dota = on_features(tiny_clip, "dota", text, config)
    ours = torch.cat([dota.predict_features(part).probabilities for part in parts])
    np.testing.assert_allclose(ours.numpy(), expected, atol=LOGIT)
    plain = (tiny_clip.scale * features @ text.T).softmax(dim=-1)
    assert np.abs(plain.numpy() - expected).max() > 0.05


def test_without_weight_it_is_zero_shot(tiny_clip: CLIP) -> None:
    features, _, text = make_clusters(30)
    dota = on_features(tiny_clip, "dota", text, DOTAConfig(largest_weight=0.0))
    logits = dota.predict_features(features).logits
    torch.testing.assert_close(logits, tiny_clip.scale * features @ text.T)


def test_it_beats_zero_shot_where_classes_are_beside_their_texts(tiny_clip: CLIP) -> None:
    gains = gains_over_text(
        lambda f, text: on_features(tiny_clip, "dota", text).predict_features(f).logits
    )
    assert gains.mean() > 0.01
