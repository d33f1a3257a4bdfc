"""Small pieces of numpy that literal versions of feature-level methods are made of."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.building.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.clusters import make_clusters, make_views
from tests._helpers.tiny_world import TINY
from tests._helpers.tolerance import LOGIT, STEP

Array = npt.NDArray[np.float64]


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def unit(x: Array) -> Array:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def entropies(p: Array) -> Array:
    return np.asarray(-(p * np.log(p)).sum(axis=-1))


def surest(p: Array, fraction: float) -> npt.NDArray[np.intp]:
    """Indices of the surest fraction of views with probabilities (V, N), at least of one."""
    return np.argsort(entropies(p))[: max(1, int(fraction * len(p)))]


def insert(entries: list[Any], item: tuple[Any, ...], capacity: int) -> None:
    """Add an item to a list that holds the ``capacity`` items of the lowest first value."""
    entries.append(item)
    entries.sort(key=lambda entry: entry[0])
    del entries[capacity:]


def neighbour_graph(similarity: Array, neighbours: int) -> Array:
    """Each row's largest other entries, one row after the other."""
    B = len(similarity)
    w = np.zeros((B, B))
    for i in range(B):
        others = sorted(
            (j for j in range(B) if j != i), key=lambda j: -similarity[i, j]
        )
        for j in others[:neighbours]:
            w[i, j] = max(0.0, similarity[i, j])
    return w


def on_features(
    name: str, text: Tensor, config: Any = None, model: CLIP = TINY
) -> FeatureLevel:
    """A feature-level method whose class texts are ``text`` (N, E)."""
    prompts = ClassPrompts(tuple(f"class {i}" for i in range(len(text))), features=text)
    adapter = create_method(name, model, prompts, config)
    assert isinstance(adapter, FeatureLevel)
    return adapter


def assert_stream(
    literal: Callable[[Array, Array, float, Any], Array],
    name: str,
    config: Any,
    sizes: list[int],
    *,
    views: int = 0,
    moved: float,
    atol: float = LOGIT,
) -> None:
    """A stream (B, E) or (B, V, E) in parts has a literal version's probabilities, not CLIP's."""
    features, _, text = make_clusters(sum(sizes))
    stream = make_views(features, views) if views else features
    adapter = on_features(name, text, config)
    scale = TINY.scale
    expected = literal(stream.double().numpy(), text.double().numpy(), scale, config)
    parts = [
        adapter.predict_features(part).probabilities for part in stream.split(sizes)
    ]
    np.testing.assert_allclose(torch.cat(parts).numpy(), expected, atol=atol)

    # CLIP's own probabilities are others.
    plain = softmax((scale * features @ text.T).numpy())
    assert np.abs(plain - expected).max() > moved


def assert_batch(
    literal: Callable[..., Array],
    transduce: Callable[..., Tensor],
    images: int,
    config: Any,
) -> None:
    """Assignments of a batch are a literal version's, and not the zero-shot ones."""
    features, _, text = (
        x.double() if x.is_floating_point() else x for x in make_clusters(images)
    )
    prior = (10 * features @ text.T).softmax(dim=-1)
    expected = literal(features.numpy(), prior.numpy(), text.numpy(), config)
    actual = transduce(features, prior.log(), text, config).exp()
    np.testing.assert_allclose(actual.numpy(), expected, atol=STEP)
    assert np.abs(expected - prior.numpy()).max() > 0.02
