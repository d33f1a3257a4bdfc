"""TDA against a numpy version that takes one image after the other and keeps lists."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from cliquetta.methods import tda as tda_module
from cliquetta.methods.registry import get_method
from cliquetta.methods.tda import TDAConfig, classes_within, most_classes
from tests._helpers.arrays import Array, on_features, softmax
from tests._helpers.clusters import make_clusters, make_views
from tests._helpers.tiny_world import TINY
from tests._helpers.tolerance import LOGIT


def take_in(cache: dict[int, list[Any]], label: int, item: tuple[Any, ...], capacity: int) -> None:
    entries = cache.setdefault(label, [])
    if len(entries) < capacity:
        entries.append(item)
    elif item[1] < entries[-1][1]:
        entries[-1] = item
    entries.sort(key=lambda entry: entry[1])


def numpy_tda(
    stream: Array, text: Array, scale: float, config: TDAConfig, *, read_first: bool = False
) -> tuple[Array, dict[int, list[Any]], dict[int, list[Any]]]:
    """Logits of a stream (B, V, E), and both caches at its end."""
    positive: dict[int, list[Any]] = {}
    negative: dict[int, list[Any]] = {}
    N = len(text)
    predictions = []
    for views in stream:
        z = scale * views @ text.T
        p = softmax(z)
        if len(views) > 1:
            order = np.argsort(-(p * np.log(p)).sum(axis=1))[
                : int(config.selection_fraction * len(views))
            ]
            views, z, p = views[order], z[order], p[order]
        f, z, p = views.mean(axis=0), z.mean(axis=0), p.mean(axis=0)
        entropy = -(p * np.log(p)).sum()
        label = int(z.argmax())
        share = entropy / math.log2(N)

        def insert(f: Array, p: Array, entropy: float, label: int, share: float) -> None:
            take_in(positive, label, (f, entropy), config.positive_capacity)
            if config.entropy_window[0] < share < config.entropy_window[1]:
                take_in(negative, label, (f, entropy, p), config.negative_capacity)

        if not read_first:
            insert(f, p, entropy, label, share)
        out = z.copy()
        for c, entries in positive.items():
            for key, _ in entries:
                out[c] += config.positive_alpha * np.exp(-config.positive_beta * (1 - f @ key))
        low, high = config.probability_window
        for entries in negative.values():
            for key, _, q in entries:
                weight = config.negative_alpha * np.exp(-config.negative_beta * (1 - f @ key))
                out -= weight * ((q > low) & (q < high))
        if read_first:
            insert(f, p, entropy, label, share)
        predictions.append(out)
    return np.stack(predictions), positive, negative


SHARP = TDAConfig(positive_alpha=1.3, positive_beta=6.0, negative_alpha=0.9, negative_beta=2.0)


@pytest.mark.parametrize("dense", [0, tda_module.DENSE])
@pytest.mark.parametrize("views", [1, 20])
@pytest.mark.parametrize("config", [TDAConfig(), SHARP])
def test_a_stream_equals_numpy_one_by_one(
    views: int, config: TDAConfig, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tda_module, "DENSE", dense)
    features, _, text = make_clusters(120)
    stream = make_views(features, views)
    expected, positive, negative = numpy_tda(
        stream.double().numpy(), text.double().numpy(), TINY.scale, config
    )
    tda = on_features(TINY, "tda", text, config)
    parts = [tda.predict_features(part).logits for part in stream.split([50, 1, 30, 39])]
    np.testing.assert_allclose(torch.cat(parts).numpy(), expected, atol=LOGIT)
    assert any(negative.values()), "the negative cache was never asked"
    for name, lists in (("positive", positive), ("negative", negative)):
        entropies = tda.memory[f"{name}.entropy"]
        for c in range(len(text)):
            wanted = [entry[1] for entry in lists.get(c, [])]
            np.testing.assert_allclose(entropies[c][: len(wanted)].numpy(), wanted, rtol=LOGIT)
            assert entropies[c][len(wanted) :].isinf().all()


@pytest.mark.parametrize(
    "window", [(0.03, 1.0), (0.25, 0.9), (0.2, 0.2), (0.0, 0.5), (-1.0, 2.0), (1.5, 2.0)]
)
def test_all_classes_of_a_window_are_kept(window: tuple[float, float]) -> None:
    logits = torch.randn(200, 60, generator=torch.Generator().manual_seed(0))
    for sharpness in (0.0, 1.0, 3.0, 30.0):  # from one over all classes to one class
        for N in (2, 4, 5, 33, 60):
            p = (sharpness * logits[:, :N]).softmax(dim=1)
            listed = classes_within(p, window, most_classes(window[0], N))
            inside = (p > window[0]) & (p < window[1])
            assert [{c - 1 for c in row if c} for row in listed.tolist()] == [
                set(row.nonzero()[:, 0].tolist()) for row in inside
            ]


def test_memory_grows_linearly_with_the_classes() -> None:
    def held(classes: int) -> int:
        tda = on_features(TINY, "tda", torch.eye(classes, 24))
        return sum(v.numel() * v.element_size() for v in tda.memory.state_dict().values())

    assert held(800) == 10 * held(80)


def test_tuned_constants_are_presets_and_the_default_is_imagenets() -> None:
    entry = get_method("tda")
    assert len(entry.tuned_by_authors) == 15
    assert entry.presets["imagenet"] == TDAConfig() == entry.config()
    assert "views" not in entry.tuned_by_authors
    assert entry.presets["views"] == TDAConfig(views=64)
    food, sketch = entry.presets["food101"], entry.presets["imagenet-sketch"]
    assert (food.positive_alpha, food.positive_beta, food.views) == (1.0, 1.0, 1)
    assert (sketch.positive_alpha, sketch.positive_beta, sketch.views) == (2.363, 7.45, 64)
    for name in entry.tuned_by_authors:  # the rest is the same everywhere
        preset = entry.presets[name]
        assert (preset.negative_alpha, preset.negative_beta) == (0.117, 1.0)
        assert (preset.positive_capacity, preset.negative_capacity) == (3, 2)
