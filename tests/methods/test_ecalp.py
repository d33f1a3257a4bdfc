"""ECALP against a numpy version on the whole graph, texts and images in one matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cliquetta.methods.ecalp import ECALP, ECALPConfig
from cliquetta.model.clip import CLIP
from tests._helpers.clusters import gains_over_text, make_clusters
from tests._helpers.literal_numpy import Array, neighbour_graph, on_features, softmax, unit
from tests._helpers.tolerance import LOGIT


def numpy_ecalp(batches: list[Array], text: Array, scale: float, config: ECALPConfig) -> Array:
    """Probabilities of a stream of batches."""
    N, d = text.shape
    seen, start, answers = np.zeros((0, d)), np.zeros((0, N)), []
    for batch in batches:
        seen = np.concatenate([seen, batch])
        start = np.concatenate([start, np.zeros((len(batch), N))])
        M = len(seen)
        weighted = unit(seen * text.var(axis=0))
        w = np.zeros((N + M, N + M))
        w[N:, N:] = neighbour_graph(weighted @ seen.T, config.image_neighbours) ** config.gamma
        for i in range(M):
            cosine = text @ seen[i]
            for k in sorted(range(N), key=lambda k: -cosine[k])[: config.text_neighbours]:
                w[N + i, k] = max(0.0, cosine[k]) ** config.gamma
        w = w + w.T
        root = np.sqrt(np.maximum(w.sum(axis=1), 1e-300))
        s = w / root[:, None] / root[None, :]
        y = np.concatenate([np.eye(N), start])
        for _ in range(config.steps):
            y = np.concatenate([np.eye(N), (s @ y)[N:]])
        scores = y[N:]
        start = np.zeros_like(scores)
        for i, row in enumerate(scores):
            start[i, row.argmax()] = row.max() / 5
        own = scores[-len(batch) :]
        own = own / own.sum(axis=1, keepdims=True)
        answers.append(0.999 * own + 0.001 * softmax(scale * batch @ text.T))
        seen, start = seen[-config.capacity :], start[-config.capacity :]
    return np.concatenate(answers)


@pytest.mark.parametrize(
    "config",
    [
        ECALPConfig(),
        ECALPConfig(capacity=20, image_neighbours=3, steps=5),  # forgets the oldest
        ECALPConfig(gamma=2.0, text_neighbours=9),
    ],
)
@pytest.mark.parametrize("sizes", [[30, 1, 14], [1] * 45])
def test_a_stream_equals_numpy(tiny_clip: CLIP, config: ECALPConfig, sizes: list[int]) -> None:
    features, _, text = make_clusters(45)
    parts = features.split(sizes)
    arrays = [part.double().numpy() for part in parts]
    expected = numpy_ecalp(arrays, text.double().numpy(), tiny_clip.scale, config)
    ecalp = on_features(tiny_clip, "ecalp", text, config)
    ours = torch.cat([ecalp.predict_features(part).probabilities for part in parts])
    np.testing.assert_allclose(ours.numpy(), expected, atol=LOGIT)


def test_empty_places_of_the_memory_change_nothing(tiny_clip: CLIP) -> None:
    features, _, text = make_clusters(24)
    ecalp = on_features(tiny_clip, "ecalp", text, ECALPConfig(capacity=40))
    assert isinstance(ecalp, ECALP)
    ecalp.predict_features(features[:16])
    names = ("features", "scores", "labels")
    whole = [ecalp.memory[name] for name in names]  # what a GPU takes
    trimmed = [values[-16:] for values in whole]
    new = features[16:]
    given, expected = (
        ecalp._propagate(torch.cat([nodes, new]), scores, labels)
        for nodes, scores, labels in (whole, trimmed)
    )
    torch.testing.assert_close(given[0], expected[0])
    torch.testing.assert_close(given[1][-24:], expected[1])
    assert given[2][-24:].equal(expected[2])
    assert not given[1][:-24].any()


def test_it_beats_zero_shot_where_classes_are_beside_their_texts(tiny_clip: CLIP) -> None:
    gains = gains_over_text(
        lambda f, text: on_features(tiny_clip, "ecalp", text).predict_features(f).logits
    )
    assert gains.mean() > 0.01
