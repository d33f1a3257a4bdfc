"""DMN against a numpy version that takes one image after the other."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from cliquetta.methods.dmn import DMN, DMNConfig
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.clusters import gains_over_text, make_clusters, make_views
from tests._helpers.tolerance import FEATURE

Array = npt.NDArray[np.float64]


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def numpy_dmn(
    stream: Array, text: Array, scale: float, config: DMNConfig, *, read_first: bool = False
) -> Array:
    """Mixed probabilities of a stream (B, V, E); memory as an array with a count per class."""
    N, E = text.shape
    memory = np.zeros((N, config.capacity, E))
    entropies = np.zeros((N, config.capacity))
    counts = np.zeros(N, dtype=int)
    answers = []
    for views in stream:
        p = softmax(scale * views @ text.T)
        kept = max(1, int(config.selection_fraction * len(views)))
        order = np.argsort(-(p * np.log(p)).sum(axis=1))[:kept]
        mean = p[order].mean(axis=0)
        label = int(mean.argmax())
        entropy = -(mean * np.log(mean)).sum()
        f = views[0]

        def remember(f: Array, label: int, entropy: float) -> None:
            slot = int(counts[label])
            if slot == config.capacity:
                slot = int(entropies[label].argmax())
                if entropy >= entropies[label][slot]:
                    return
            else:
                counts[label] += 1
            memory[label, slot], entropies[label, slot] = f, entropy

        if not read_first:
            remember(f, label, entropy)
        seen = np.zeros((N, E))
        for c in range(N):
            for m in [*memory[c, : counts[c]], text[c]]:
                seen[c] += np.exp(-config.beta * (1 - f @ m)) * m
            seen[c] /= np.linalg.norm(seen[c])
        if read_first:
            remember(f, label, entropy)
        weight = config.memory_weight
        answers.append((p[0] + weight * softmax(scale * seen @ f)) / (1 + weight))
    return np.stack(answers)


def build(model: CLIP, text: Tensor, config: DMNConfig) -> DMN:
    names = tuple(f"class {i}" for i in range(len(text)))
    return DMN(model, ClassPrompts(names, features=text), config)


@pytest.mark.parametrize("views", [1, 20])
@pytest.mark.parametrize("config", [DMNConfig(), DMNConfig(capacity=4, memory_weight=0.3)])
def test_a_stream_equals_numpy_one_by_one(tiny_clip: CLIP, views: int, config: DMNConfig) -> None:
    features, _, text = make_clusters(110)
    stream = make_views(features, views) if views > 1 else features[:, None]
    arrays = stream.double().numpy(), text.double().numpy()
    expected = numpy_dmn(*arrays, tiny_clip.scale, config)
    dmn = build(tiny_clip, text, config)
    parts = [dmn.predict_features(part).probabilities for part in stream.split([80, 1, 29])]
    np.testing.assert_allclose(torch.cat(parts).numpy(), expected, atol=FEATURE)
    other = numpy_dmn(*arrays, tiny_clip.scale, config, read_first=True)
    assert np.abs(other - expected).max() > 0.01  # reading before inserting would be told apart


def test_one_group_equals_many(tiny_clip: CLIP) -> None:
    features, _, text = make_clusters(60)
    config = DMNConfig(capacity=3)
    whole, parts = (build(tiny_clip, text, config) for _ in range(2))
    parts.group = 7
    one = whole.predict_features(features[:, None]).logits
    torch.testing.assert_close(parts.predict_features(features[:, None]).logits, one)


def test_text_stays_in_the_memory(tiny_clip: CLIP) -> None:
    """A class that no image was taken for answers by its text, so both answers agree on it."""
    text = torch.eye(3, 24)
    feature = torch.zeros(1, 1, 24)
    feature[..., 0], feature[..., 1] = 0.8, 0.6
    dmn = build(tiny_clip, text, DMNConfig())
    p = dmn.predict_features(feature).probabilities[0]
    f, t = feature[0, 0], text[0]
    own = f + math.exp(-5.5 * (1 - 0.8)) * t  # itself at distance zero, and the text
    z = tiny_clip.scale * torch.stack([f @ own / own.norm(), torch.tensor(0.6), torch.tensor(0.0)])
    fixed = (tiny_clip.scale * feature[0, 0, :3]).softmax(dim=0)
    torch.testing.assert_close(p, (fixed + z.softmax(dim=0)) / 2)


def test_it_beats_zero_shot_where_classes_lie_beside_their_texts(tiny_clip: CLIP) -> None:
    gains = gains_over_text(
        lambda f, text: build(tiny_clip, text, DMNConfig()).predict_features(f[:, None]).logits
    )
    assert gains.min() > 0
    assert gains.mean() > 0.015  # 0.03 over twenty seeds
