"""DMN against a numpy version that takes one image after the other."""

import numpy as np
import pytest

from cliquetta.methods.dmn import DMNConfig
from tests._helpers.arrays import (
    Array,
    assert_stream,
    entropies,
    insert,
    softmax,
    surest,
    unit,
)
from tests._helpers.tolerance import FEATURE


def numpy_dmn(stream: Array, text: Array, scale: float, config: DMNConfig) -> Array:
    """Mixed probabilities of a stream (B, V, E)."""
    memory: list[list[tuple[Array, Array]]] = [[] for _ in text]
    predictions = []
    for views in stream:
        # the image enters the memory of its likeliest class
        p = softmax(scale * views @ text.T)
        confident = surest(p, config.selection_fraction)
        mean = p[confident].mean(axis=0)
        label = int(mean.argmax())
        f = views[0]
        item = (entropies(mean), f)
        insert(memory[label], item, config.capacity)

        # each class reads its memory and its text, weighted by their likeness
        seen = np.zeros_like(text)
        for c, entries in enumerate(memory):
            keys = [key for _, key in entries]
            for m in [*keys, text[c]]:
                distance = 1 - f @ m
                seen[c] += np.exp(-config.beta * distance) * m
            seen[c] = unit(seen[c])

        # both predictions are mixed
        q = softmax(scale * seen @ f)
        w = config.memory_weight
        mixed = (p[0] + w * q) / (1 + w)
        predictions.append(mixed)
    return np.stack(predictions)


@pytest.mark.parametrize("views", [1, 20])
@pytest.mark.parametrize(
    "config", [DMNConfig(), DMNConfig(capacity=4, memory_weight=0.3)]
)
def test_a_stream_equals_numpy_one_by_one(views: int, config: DMNConfig) -> None:
    assert_stream(
        numpy_dmn, "dmn", config, [80, 1, 29], views=views, moved=0.01, atol=FEATURE
    )
