"""TDA against a numpy version that takes one image after the other and keeps lists."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cliquetta.methods import tda as tda_module
from cliquetta.methods.registry import get_method
from cliquetta.methods.tda import TDAConfig, classes_within, most_classes
from tests._helpers.arrays import Array, entropies, insert, on_features, softmax, surest
from tests._helpers.clusters import make_clusters, make_views
from tests._helpers.tiny_world import TINY, draw
from tests._helpers.tolerance import LOGIT

Cache = dict[
    int, list[tuple[float, Array, Array]]
]  # Entropy, feature and prediction, by class.


def numpy_tda(
    stream: Array, text: Array, scale: float, config: TDAConfig
) -> tuple[Array, Cache, Cache]:
    """Logits of a stream (B, V, E), and both caches at its end."""
    positive = Cache()
    negative = Cache()
    predictions = []
    for views in stream:
        z = scale * views @ text.T
        sure = surest(softmax(z), config.selection_fraction)
        f, z, p = (x[sure].mean(axis=0) for x in (views, z, softmax(z)))
        item = (float(entropies(p)), f, p)
        label = int(z.argmax())
        insert(positive.setdefault(label, []), item, config.positive_capacity)
        if (
            config.entropy_window[0]
            < item[0] / math.log2(len(text))
            < config.entropy_window[1]
        ):
            insert(negative.setdefault(label, []), item, config.negative_capacity)
        for c, entries in positive.items():
            for _, key, _ in entries:
                z[c] += config.positive_alpha * np.exp(
                    -config.positive_beta * (1 - f @ key)
                )
        low, high = config.probability_window
        for entries in negative.values():
            for _, key, q in entries:
                weight = config.negative_alpha * np.exp(
                    -config.negative_beta * (1 - f @ key)
                )
                z -= weight * ((q > low) & (q < high))
        predictions.append(z)
    return np.stack(predictions), positive, negative


SHARP = TDAConfig(
    positive_alpha=1.3, positive_beta=6.0, negative_alpha=0.9, negative_beta=2.0
)


@pytest.mark.parametrize("dense", [0, tda_module.DENSE])
@pytest.mark.parametrize("views", [1, 20])
@pytest.mark.parametrize("config", [TDAConfig(), SHARP])
def test_a_stream_equals_numpy_one_by_one(
    views: int, config: TDAConfig, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tda_module, "DENSE", dense)
    features, _, text = make_clusters(120)
    stream = make_views(features, views)
    arrays = stream.double().numpy(), text.double().numpy()
    expected, positive, negative = numpy_tda(*arrays, TINY.scale, config)
    tda = on_features("tda", text, config)
    parts = [
        tda.predict_features(part).logits for part in stream.split([50, 1, 30, 39])
    ]
    np.testing.assert_allclose(torch.cat(parts).numpy(), expected, atol=LOGIT)
    assert any(negative.values()), "the negative cache was never asked"
    for name, lists in (("positive", positive), ("negative", negative)):
        entropies = tda.memory[f"{name}.entropy"]
        for c in range(len(text)):
            wanted = [entry[0] for entry in lists.get(c, [])]
            np.testing.assert_allclose(
                entropies[c][: len(wanted)].numpy(), wanted, rtol=LOGIT
            )
            assert entropies[c][len(wanted) :].isinf().all()


@pytest.mark.parametrize(
    "window",
    [(0.03, 1.0), (0.25, 0.9), (0.2, 0.2), (0.0, 0.5), (-1.0, 2.0), (1.5, 2.0)],
)
def test_all_classes_of_a_window_are_listed(window: tuple[float, float]) -> None:
    logits = draw(200, 60)
    for sharpness in (0.0, 1.0, 3.0, 30.0):  # from one over all classes to one class
        for N in (2, 4, 5, 33, 60):
            p = (sharpness * logits[:, :N]).softmax(dim=1)
            listed = classes_within(p, window, most_classes(window[0], N))
            inside = F.pad((p > window[0]) & (p < window[1]), (1, 0))  # class 0 is none
            assert (
                torch.zeros_like(inside)
                .scatter(1, listed, True)[:, 1:]
                .equal(inside[:, 1:])
            )


def test_memory_grows_linearly_with_the_classes() -> None:
    def held(classes: int) -> int:
        tda = on_features("tda", torch.eye(classes, 24))
        return sum(
            v.numel() * v.element_size() for v in tda.memory.state_dict().values()
        )

    assert held(800) == 10 * held(80)


def test_tuned_constants_are_presets_and_the_default_is_imagenets() -> None:
    entry = get_method("tda")
    assert len(entry.tuned_by_authors) == 15
    assert entry.presets["imagenet"] == TDAConfig() == entry.config()
    assert "views" not in entry.tuned_by_authors
    assert entry.presets["views"] == TDAConfig(views=64)
    for name, alpha, beta, views in (
        ("food101", 1, 1, 1),
        ("imagenet-sketch", 2.363, 7.45, 64),
    ):
        changed: dict[str, Any] = {
            "positive_alpha": alpha,
            "positive_beta": beta,
            "views": views,
        }
        assert entry.presets[name] == TDAConfig(**changed)
    for name in entry.tuned_by_authors:  # the rest is the same everywhere
        preset = vars(entry.presets[name])
        same = set(preset) - {"positive_alpha", "positive_beta", "views"}
        assert all(preset[field] == vars(TDAConfig())[field] for field in same)
