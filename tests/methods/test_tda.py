"""TDA against a numpy version that takes one image after the other and keeps lists."""

import math

import numpy as np
import pytest
import torch

from cliquetta.methods import tda as tda_module
from cliquetta.methods.building.registry import get_method
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
    least, most = config.entropy_window
    low, high = config.probability_window

    for views in stream:
        # means of the surest views
        logits = scale * views @ text.T
        sure = surest(softmax(logits), config.selection_fraction)
        f = views[sure].mean(axis=0)
        z = logits[sure].mean(axis=0)
        p = softmax(logits)[sure].mean(axis=0)

        # the image enters the positive cache, and the negative one if it is in doubt
        entropy = float(entropies(p))
        item = (entropy, f, p)
        label = int(z.argmax())
        insert(positive.setdefault(label, []), item, config.positive_capacity)
        if least < entropy / math.log2(len(text)) < most:
            insert(negative.setdefault(label, []), item, config.negative_capacity)

        # like images speak for their class, and against what they may have been
        for c, entries in positive.items():
            for _, key, _ in entries:
                affinity = np.exp(-config.positive_beta * (1 - f @ key))
                z[c] += config.positive_alpha * affinity
        for entries in negative.values():
            for _, key, q in entries:
                affinity = np.exp(-config.negative_beta * (1 - f @ key))
                in_doubt = (q > low) & (q < high)
                z -= config.negative_alpha * affinity * in_doubt
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
    expected, positive, negative = numpy_tda(
        stream.double().numpy(),
        text.double().numpy(),
        TINY.scale,
        config,
    )

    assert any(negative.values()), "the negative cache was never asked"

    tda = on_features("tda", text, config)
    actual = []
    for part in stream.split([50, 1, 30, 39]):
        actual.append(tda.predict_features(part).logits)
    logits = torch.cat(actual).numpy()

    np.testing.assert_allclose(logits, expected, atol=LOGIT)
    # both caches hold the same entropies, and nothing else
    for name, lists in (("positive", positive), ("negative", negative)):
        for c, row in enumerate(tda.memory[f"{name}.entropy"]):
            entries = lists.get(c, [])
            wanted = [entropy for entropy, _, _ in entries]
            filled = row[: len(entries)].numpy()
            np.testing.assert_allclose(filled, wanted, rtol=LOGIT)
            assert row[len(entries) :].isinf().all()


@pytest.mark.parametrize(
    "window",
    [(0.03, 1.0), (0.25, 0.9), (0.2, 0.2), (0.0, 0.5), (-1.0, 2.0), (1.5, 2.0)],
)
def test_all_classes_of_a_window_are_listed(window: tuple[float, float]) -> None:
    logits = draw(200, 60)
    low, high = window
    for sharpness in (0.0, 1.0, 3.0, 30.0):  # from one over all classes to one class
        for N in (2, 4, 5, 33, 60):
            p = (sharpness * logits[:, :N]).softmax(dim=1)
            most = most_classes(low, N)
            listed = classes_within(p, window, most)

            # classes are numbered from one: zero is none
            marked = torch.zeros(200, N + 1, dtype=torch.bool)
            marked.scatter_(1, listed, True)
            above = p > low
            below = p < high
            assert marked[:, 1:].equal(above & below)


def test_memory_grows_linearly_with_the_classes() -> None:
    def held(classes: int) -> int:
        tda = on_features("tda", torch.eye(classes, 24))
        return sum(value.nbytes for value in tda.memory.state_dict().values())

    assert held(800) == 10 * held(80)


def test_the_default_is_imagenets() -> None:
    entry = get_method("tda")
    assert entry.presets["imagenet"] == TDAConfig()
    assert entry.config() == TDAConfig()


@pytest.mark.parametrize(
    ("name", "alpha", "beta", "views"),
    [("food101", 1, 1, 1), ("imagenet-sketch", 2.363, 7.45, 64), ("views", 2, 5, 64)],
)
def test_presets_are_the_authors(
    name: str, alpha: float, beta: float, views: int
) -> None:
    preset = get_method("tda").presets[name]
    assert preset == TDAConfig(positive_alpha=alpha, positive_beta=beta, views=views)


def test_tuned_constants_are_those_of_the_positive_cache() -> None:
    entry = get_method("tda")
    assert len(entry.tuned_by_authors) == 15
    assert "views" not in entry.tuned_by_authors

    default = vars(TDAConfig())
    for name in entry.tuned_by_authors:
        preset = vars(entry.presets[name])
        changed = {field for field in preset if preset[field] != default[field]}
        assert changed <= {"positive_alpha", "positive_beta", "views"}
