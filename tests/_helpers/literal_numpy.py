"""Small pieces of numpy that literal versions of feature-level methods are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cliquetta.methods.building.feature_level import FeatureLevel
from cliquetta.methods.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts

Array = npt.NDArray[np.float64]


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def unit(x: Array) -> Array:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def neighbour_graph(similarity: Array, neighbours: int) -> Array:
    """Each row's largest other entries, one row after the other."""
    B = len(similarity)
    w = np.zeros((B, B))
    for i in range(B):
        others = sorted((j for j in range(B) if j != i), key=lambda j: -similarity[i, j])
        for j in others[:neighbours]:
            w[i, j] = max(0.0, similarity[i, j])
    return w


def on_features(model: CLIP, name: str, text: Tensor, config: Any = None) -> FeatureLevel:
    """A feature-level method whose class texts are ``text`` (N, E)."""
    prompts = ClassPrompts(tuple(f"class {i}" for i in range(len(text))), features=text)
    adapter = create_method(name, model, prompts, config)
    assert isinstance(adapter, FeatureLevel)
    return adapter
