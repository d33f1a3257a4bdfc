"""DMN against a numpy version that takes one image after the other."""

import numpy as np
import pytest

from cliquetta.methods.dmn import DMNConfig
from tests._helpers.arrays import Array, assert_stream, on_features, softmax
from tests._helpers.clusters import make_clusters, make_views
from tests._helpers.tiny_world import TINY
from tests._helpers.tolerance import FEATURE


def numpy_dmn(
    stream: Array, text: Array, scale: float, config: DMNConfig, *, read_first: bool = False
) -> Array:
    """Mixed probabilities of a stream (B, V, E); memory as an array with a count per class."""
    N, E = text.shape
    memory = np.zeros((N, config.capacity, E))
    entropies = np.zeros((N, config.capacity))
    counts = np.zeros(N, dtype=int)
    predictions = []
    for views in stream:
        p = softmax(scale * views @ text.T)
        count = max(1, int(config.selection_fraction * len(views)))
        order = np.argsort(-(p * np.log(p)).sum(axis=1))[:count]
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
        predictions.append((p[0] + weight * softmax(scale * seen @ f)) / (1 + weight))
    return np.stack(predictions)


@pytest.mark.parametrize("views", [1, 20])
@pytest.mark.parametrize("config", [DMNConfig(), DMNConfig(capacity=4, memory_weight=0.3)])
def test_a_stream_equals_numpy_one_by_one(views: int, config: DMNConfig) -> None:
    features, _, text = make_clusters(110)
    stream = make_views(features, views)
    dmn = on_features(TINY, "dmn", text, config)
    assert_stream(numpy_dmn, dmn, stream, [80, 1, 29], moved=0.01, atol=FEATURE)
    arrays = stream.double().numpy(), text.double().numpy(), TINY.scale
    late = numpy_dmn(*arrays, config, read_first=True)
    assert np.abs(late - numpy_dmn(*arrays, config)).max() > 0.01  # the order matters
