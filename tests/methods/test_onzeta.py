"""OnZeta against a numpy version of the printed updates; its proxies against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cliquetta.methods.onzeta import OnZeta, OnZetaConfig, vision_labels
from cliquetta.model.clip import CLIP
from tests._helpers.clusters import make_clusters
from tests._helpers.literal_numpy import Array, on_features, softmax, unit
from tests._helpers.tolerance import LOGIT


def numpy_onzeta(stream: Array, text: Array, scale: float, config: OnZetaConfig) -> Array:
    """Answers, one image after the other."""
    N = len(text)
    tau_v = config.vision_temperature / scale
    w, rho, predictions = text.copy(), np.zeros(N), []
    for t, f in enumerate(stream, start=1):
        q = softmax(scale * text @ f) * np.exp(rho)
        q /= q.sum()
        rho = np.maximum(0, rho - config.dual_lr / np.sqrt(t) * (q - config.balance / N))
        r = softmax(w @ f / tau_v)
        beta = config.vision_weight * np.sqrt(min(t, config.horizon) / config.horizon)
        predictions.append(beta * r + (1 - beta) * q)
        for k in range(N):
            w[k] = unit(w[k] - config.proxy_lr / np.sqrt(t) / tau_v * (r[k] - q[k]) * f)
    return np.stack(predictions)


@pytest.mark.parametrize(
    "config", [OnZetaConfig(), OnZetaConfig(dual_lr=1.0, horizon=20, vision_temperature=1.0)]
)
def test_a_stream_equals_numpy(tiny_clip: CLIP, config: OnZetaConfig) -> None:
    features, _, text = make_clusters(50)
    expected = numpy_onzeta(
        features.double().numpy(), text.double().numpy(), tiny_clip.scale, config
    )
    adapter = on_features(tiny_clip, "onzeta", text, config)
    parts = [adapter.predict_features(part).probabilities for part in features.split([30, 1, 19])]
    np.testing.assert_allclose(torch.cat(parts).numpy(), expected, atol=LOGIT)
    plain = (tiny_clip.scale * features @ text.T).softmax(dim=-1)
    assert np.abs(plain.numpy() - expected).max() > 0.1


def test_rows_of_zeros_are_no_images(tiny_clip: CLIP) -> None:
    features, _, text = make_clusters(20)
    plain, padded = (on_features(tiny_clip, "onzeta", text) for _ in range(2))
    assert isinstance(plain, OnZeta) and isinstance(padded, OnZeta)
    for part in features.split(10):
        (expected,) = plain._learn(part)
        (actual,) = padded._learn(torch.cat([part, torch.zeros(6, part.shape[1])]))
        torch.testing.assert_close(actual[:10], expected)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(padded.memory[name], value)


def test_proxies_step_down_the_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    start, features = (
        torch.nn.functional.normalize(torch.randn(n, 6, generator=generator).double(), dim=-1)
        for n in (3, 4)
    )
    q, w, expected = torch.tensor([0.2, 0.7, 0.1]).double(), start, []
    for f in features:
        leaf = w.clone().requires_grad_()
        logs = (leaf @ f / 0.1).log_softmax(dim=-1)
        (gradient,) = torch.autograd.grad(-(q * logs).sum(), leaf)
        expected.append(logs.detach().exp())
        w = torch.nn.functional.normalize(w - 0.3 * gradient, dim=-1)
    lrs = torch.full((4,), 0.3 * 10).double()
    labels = q.expand(4, -1)
    vision, shares = vision_labels(features @ start.T, features @ features.T, labels, lrs, 10.0)
    torch.testing.assert_close(vision, torch.stack(expected))
    moved = torch.nn.functional.normalize(start + shares.T @ features, dim=-1)
    torch.testing.assert_close(moved, w)
