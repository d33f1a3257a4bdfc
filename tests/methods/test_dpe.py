"""DPE against a loop with lists for caches, autograd and torch's AdamW."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cliquetta.methods.dpe import DPEConfig
from tests._helpers.arrays import insert, on_features
from tests._helpers.clusters import make_clusters, make_views
from tests._helpers.live import entropies, surest, unit_rows
from tests._helpers.tiny_world import TINY
from tests._helpers.tolerance import LOGIT

LIVELY = DPEConfig(lr=0.05, alpha=3.0, update_threshold=0.3)


def literal_dpe(
    stream: Tensor, text: Tensor, scale: float, config: DPEConfig
) -> Tensor:
    """Logits of a stream (B, V, E)."""
    base = text.clone()
    averaged = 0
    predictions = []
    cache: dict[int, list[tuple[float, Tensor]]] = {}

    def confident(views: Tensor, t: Tensor) -> Tensor:
        rows = surest(scale * views @ t.T, config.selection_fraction)
        return views[rows]

    def logits(f: Tensor, t: Tensor, v: Tensor) -> Tensor:
        """Text logits, and for classes with a prototype what it adds."""
        actual = scale * t @ f
        affinity = torch.exp(-config.beta * (1 - v @ f))
        added = torch.zeros_like(actual)
        added[sorted(cache)] = config.alpha * affinity
        return actual + added

    for views in stream:
        # the image enters the cache of its class
        selected = confident(views, unit_rows(base))
        z = scale * selected @ unit_rows(base).T
        label = int(z.mean(dim=0).argmax())
        mean = z.softmax(dim=-1).mean(dim=0)
        feature = selected.mean(dim=0)
        item = (float(entropies(mean.log())), feature)
        insert(cache.setdefault(label, []), item, config.capacity)

        # prototypes are means of the cached features, of the classes that have any
        classes = sorted(cache)
        means = []
        for c in classes:
            features = torch.stack([f for _, f in cache[c]])
            means.append(features.mean(dim=0))
        prototypes = torch.stack(means)

        # one step of residuals of texts and prototypes
        dt = torch.zeros_like(base, requires_grad=True)
        dv = torch.zeros_like(prototypes, requires_grad=True)
        t = unit_rows(base + dt)
        v = unit_rows(prototypes + dv)
        alignment = torch.zeros(())
        for j, _ in enumerate(classes):
            z = torch.stack([v[j] @ t[c] / 0.01 for c in classes])
            alignment = alignment - z.log_softmax(dim=0)[j]
        loss = entropies(logits(feature, t, v))
        loss = loss + config.alignment_weight * alignment / len(classes)
        loss.backward()
        optimiser = torch.optim.AdamW(
            [dt, dv], lr=config.lr, eps=1e-3, weight_decay=0.1
        )
        optimiser.step()

        with torch.no_grad():
            t = unit_rows(base + dt)
            v = unit_rows(prototypes + dv)
            scored = views[0]
            if config.scored == "confident":
                scored = confident(views, t).mean(dim=0)
            prediction = logits(scored, t, v)
            predictions.append(prediction)

            # sure predictions teach the texts: a running mean
            share = float(entropies(prediction)) / math.log2(len(text))
            if share < config.update_threshold:
                averaged += 1
                base = (averaged * base + t) / (averaged + 1)
    return torch.stack(predictions)


@pytest.mark.parametrize(
    "config", [DPEConfig(), LIVELY, replace(LIVELY, scored="confident")]
)
def test_a_stream_equals_a_loop(config: DPEConfig) -> None:
    features, _, text = make_clusters(40)
    stream = make_views(features, 20).double()
    text = text.double()
    expected = literal_dpe(stream, text, TINY.scale, config).float()

    dpe = on_features("dpe", text, config)
    actual = []
    for part in stream.split([25, 1, 14]):
        actual.append(dpe.predict_features(part).logits)
    logits = torch.cat(actual)

    torch.testing.assert_close(logits, expected, atol=LOGIT, rtol=LOGIT)
    # some predictions were sure, others not
    assert 0 < int(dpe.memory["updates"]) < 40
