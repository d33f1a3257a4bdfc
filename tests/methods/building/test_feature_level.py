"""Feature-level methods: gains on clusters, groups of any size, replayed steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.onzeta import OnZeta, OnZetaConfig
from cliquetta.methods.tda import TDAConfig
from tests._helpers.arrays import on_features
from tests._helpers.clusters import make_clusters, make_views
from tests._helpers.tiny_world import TINY, TINY_PROMPTS
from tests._helpers.tolerance import LOGIT


@pytest.mark.parametrize(
    ("name", "least", "mean"),
    [
        ("dmn", 0.0, 0.015),  # 0.03 over twenty seeds
        ("dota", -1.0, 0.01),
        ("ecalp", -1.0, 0.01),
        ("oga", -1.0, 0.01),
        ("stata", 0.0, 0.0),
        ("tda", 0.0, 0.03),  # 0.06 over twenty seeds
        ("transclip", 0.0, 0.025),  # 0.06 over twenty seeds
    ],
)
def test_it_beats_zero_shot_where_classes_lie_beside_their_texts(
    name: str, least: float, mean: float
) -> None:
    seeds = range(5)  # one lucky set of clusters proves nothing
    gains = []
    for seed in seeds:
        features, labels, text = make_clusters(400, seed=seed)
        adapted = on_features(name, text).predict_features(features).logits
        zero_shot = features @ text.T
        right = adapted.argmax(dim=-1) == labels
        right_before = zero_shot.argmax(dim=-1) == labels
        gain = right.float().mean() - right_before.float().mean()
        gains.append(float(gain))

    assert min(gains) > least
    assert sum(gains) / len(seeds) > mean


SHARP = TDAConfig(
    positive_alpha=1.3, positive_beta=6.0, negative_alpha=0.9, negative_beta=2.0
)


@pytest.mark.parametrize(
    ("name", "bound", "size", "config"),
    [
        ("bca", "building.feature_level.GROUP", 7, None),
        ("dmn", "dmn.ELEMENTS", 7 * 5 * 24, None),
        ("onzeta", "building.feature_level.GROUP", 7, None),
        ("tda", "tda.GROUP", 7, SHARP),
        ("tps", "tps.ELEMENTS", 2 * 5 * 24, None),
    ],
)
def test_groups_change_nothing(
    name: str, bound: str, size: int, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, _, text = make_clusters(60)
    views = make_views(features, 20)
    full = on_features(name, text, config).predict_features(views).logits

    monkeypatch.setattr(f"cliquetta.methods.{bound}", size)
    grouped = on_features(name, text, config)
    parts = grouped.predict_features(views).logits

    torch.testing.assert_close(parts, full, atol=LOGIT, rtol=LOGIT)


def test_recordings_of_two_steps_are_distinguished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = OnZeta(TINY, TINY_PROMPTS, OnZetaConfig())
    called = []

    def note(function: Any, *inputs: Tensor) -> Any:
        called.append(function.__name__)
        return function(*inputs)

    def other(features: Tensor) -> tuple[Tensor]:
        return (features,)

    monkeypatch.setattr(adapter, "_replayed", note)
    features = torch.zeros(2, TINY.embed_dim)
    adapter.predict_group(features)
    adapter.replay(other, features)

    assert called == ["_learn", "other"]
