"""OnZeta against a numpy version of the printed updates."""

import numpy as np
import pytest
import torch

from cliquetta.methods.onzeta import OnZeta, OnZetaConfig
from tests._helpers.arrays import Array, assert_stream, on_features, softmax, unit
from tests._helpers.clusters import make_clusters


def numpy_onzeta(
    stream: Array, text: Array, scale: float, config: OnZetaConfig
) -> Array:
    """Predictions, one image after the other."""
    N = len(text)
    temperature = config.vision_temperature / scale
    w = text.copy()
    rho = np.zeros(N)
    predictions = []
    for t, f in enumerate(stream, start=1):
        # text: zero-shot with dual variables that even the classes out
        q = softmax(scale * text @ f) * np.exp(rho)
        q /= q.sum()
        excess = q - config.balance / N
        rho = np.maximum(0, rho - config.dual_lr / np.sqrt(t) * excess)

        # vision: proxies that learn, with a weight that grows
        r = softmax(w @ f / temperature)
        grown = min(t, config.horizon) / config.horizon
        beta = config.vision_weight * np.sqrt(grown)
        predictions.append(beta * r + (1 - beta) * q)

        rate = config.proxy_lr / np.sqrt(t) / temperature
        for k in range(N):
            w[k] = unit(w[k] - rate * (r[k] - q[k]) * f)
    return np.stack(predictions)


@pytest.mark.parametrize(
    "config",
    [
        OnZetaConfig(),
        OnZetaConfig(dual_lr=1.0, balance=0.5, horizon=20, vision_temperature=1.0),
    ],
)
def test_a_stream_equals_numpy(config: OnZetaConfig) -> None:
    assert_stream(numpy_onzeta, "onzeta", config, [30, 1, 19], moved=0.1)


def test_rows_of_zeros_are_no_images() -> None:
    features, _, text = make_clusters(20)
    plain = on_features("onzeta", text)
    padded = on_features("onzeta", text)

    assert isinstance(plain, OnZeta)
    assert isinstance(padded, OnZeta)

    for part in features.split(10):
        no_images = torch.zeros(6, part.shape[1])
        (expected,) = plain._learn(part)
        (actual,) = padded._learn(torch.cat([part, no_images]))
        torch.testing.assert_close(actual[:10], expected)
        torch.testing.assert_close(padded.state_dict(), plain.state_dict())
