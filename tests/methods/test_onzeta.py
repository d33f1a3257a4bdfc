"""OnZeta against a numpy version of the printed updates; its proxies against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cliquetta.methods._shared import feature_level
from cliquetta.methods.onzeta import OnZetaConfig, Proxies, dual_step
from cliquetta.model.clip import CLIP
from tests._helpers.clusters import make_clusters
from tests._helpers.literal_numpy import Array, on_features, softmax, unit


def numpy_onzeta(stream: Array, text: Array, scale: float, config: OnZetaConfig) -> Array:
    """Answers, one image after the other."""
    N = len(text)
    tau_v = config.vision_temperature / scale
    w, rho, answers = text.copy(), np.zeros(N), []
    for t, f in enumerate(stream, start=1):
        q = softmax(scale * text @ f) * np.exp(rho)
        q /= q.sum()
        rho = np.maximum(0, rho - config.dual_lr / np.sqrt(t) * (q - config.balance / N))
        r = softmax(w @ f / tau_v)
        beta = config.vision_weight * np.sqrt(min(t, config.horizon) / config.horizon)
        answers.append(beta * r + (1 - beta) * q)
        for k in range(N):
            w[k] = unit(w[k] - config.proxy_lr / np.sqrt(t) / tau_v * (r[k] - q[k]) * f)
    return np.stack(answers)


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
    np.testing.assert_allclose(torch.cat(parts).numpy(), expected, atol=1e-4)
    plain = (tiny_clip.scale * features @ text.T).softmax(dim=-1)
    assert np.abs(plain.numpy() - expected).max() > 0.1


@pytest.mark.parametrize("name", ["onzeta", "bca"])
def test_groups_change_nothing(name: str, tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    features, _, text = make_clusters(40)
    whole = on_features(tiny_clip, name, text).predict_features(features).logits
    monkeypatch.setattr(feature_level, "GROUP", 7)
    parts = on_features(tiny_clip, name, text).predict_features(features).logits
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


def test_a_class_that_is_never_predicted_gains_weight() -> None:
    dual = np.zeros(4)
    for _ in range(3):
        dual = dual_step(dual, np.array([0.9, 0.1, 0.0, 0.0]), lr=0.5, balance=1.0)
    np.testing.assert_allclose(dual, [0.0, 0.225, 0.375, 0.375])


def test_proxies_step_down_the_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.nn.functional.normalize(torch.randn(3, 6, generator=generator), dim=-1)
    features = torch.nn.functional.normalize(torch.randn(4, 6, generator=generator), dim=-1)
    q = torch.tensor([0.2, 0.7, 0.1])
    proxies = Proxies(w, features)
    for row, f in enumerate(features):
        cosines = proxies.cosines(row)
        np.testing.assert_allclose(cosines, w @ f, atol=1e-5, rtol=1e-5)
        leaf = w.clone().requires_grad_()
        loss = -(q * (leaf @ f / 0.1).log_softmax(dim=-1)).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        w = torch.nn.functional.normalize(w - 0.3 * gradient, dim=-1)
        proxies.step(row, cosines, 0.3 / 0.1 * (softmax(cosines / 0.1) - q.numpy()))
    torch.testing.assert_close(proxies.proxies(), w, atol=1e-5, rtol=1e-5)
