"""TPS against torch's AdamW on one image at a time."""

import pytest
import torch
from torch import Tensor

from cliquetta.methods.tps import TPSConfig
from tests._helpers.arrays import on_features
from tests._helpers.clusters import make_clusters, make_views
from tests._helpers.live import descend, surest, unit_rows
from tests._helpers.tiny_world import TINY
from tests._helpers.tolerance import LOGIT


def literal_tps(views: Tensor, text: Tensor, scale: float, config: TPSConfig) -> Tensor:
    """Logits (N,) of one image whose views are (V, E)."""
    shift = torch.zeros_like(text, requires_grad=True)
    optimiser = torch.optim.AdamW(
        [shift],
        lr=config.lr,
        weight_decay=config.weight_decay,
    )
    for _ in range(config.steps):
        moved = unit_rows(text + shift)
        logits = scale * views @ moved.T
        selected = logits[surest(logits, config.selection_fraction)]
        mean = selected.softmax(dim=-1).mean(dim=0)
        descend(optimiser, -(mean * mean.log()).sum())
    with torch.no_grad():
        return scale * unit_rows(text + shift) @ views[0]


@pytest.mark.parametrize(
    "config", [TPSConfig(), TPSConfig(steps=3, lr=0.1, weight_decay=0.3)]
)
def test_every_image_equals_torch(config: TPSConfig) -> None:
    features, _, text = make_clusters(6)
    text = text.double()
    views = make_views(features, 30).double()
    tps = on_features("tps", text, config)
    actual = tps.predict_features(views).logits

    literal = [literal_tps(view, text, TINY.scale, config) for view in views]
    expected = torch.stack(literal).float()
    torch.testing.assert_close(actual, expected, atol=LOGIT, rtol=LOGIT)

    # it moves: without a step the logits are others
    plain = TINY.scale * features.double() @ text.T
    assert not torch.allclose(actual, plain.float(), atol=0.02)
