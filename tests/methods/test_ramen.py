"""Ramen against lists and one image at a time on the model's own LayerNorms."""

import math

import pytest
import torch
from torch import Tensor

from cliquetta.methods.ramen import Ramen, RamenConfig
from tests._helpers.live import Live, double_clip, entropies, flat, load_norms
from tests._helpers.tiny_world import TINY_IMAGES, TINY_PROMPTS


def literal_ramen(batches: tuple[Tensor, ...], config: RamenConfig) -> Tensor:
    """Logits of a stream; the norms start again for each image."""
    live = Live()
    start = flat(live.norms)
    memory: list[tuple[int, Tensor, Tensor, float]] = []
    predictions = []
    for images in batches:
        for image in images:
            z = live.features(image[None])[0]
            logits = live.scale * live.text @ z
            entropy = entropies(logits)
            gradient = flat(list(torch.autograd.grad(entropy, live.norms)))
            memory.append(
                (int(logits.argmax()), z.detach(), gradient, float(entropy.detach()))
            )
        for image, (_, z, _, _) in zip(images, memory[-len(images) :], strict=True):
            step = torch.zeros_like(start)
            for c in range(len(live.text)):
                entries = [
                    (float((e[1] - z).norm()), *e[2:]) for e in memory if e[0] == c
                ]
                for distance, g, h in sorted(entries, key=lambda e: e[0])[
                    : config.neighbours
                ]:
                    step += g * math.exp(-h - config.distance_weight * distance)
            load_norms(live.norms, start - config.lr * step.sign())
            with torch.no_grad():
                predictions.append(live.logits(image[None])[0])
            load_norms(live.norms, start)
        del memory[: -config.capacity]
    return torch.stack(predictions).float()


@pytest.mark.parametrize(
    "config",
    [
        RamenConfig(),
        RamenConfig(
            capacity=5, neighbours=1, distance_weight=0.5
        ),  # images are forgotten
        RamenConfig(neighbours=2, distance_weight=0.0, lr=1e-3),
    ],
)
@pytest.mark.parametrize("sizes", [[10, 6], [1] * 16])
def test_a_stream_equals_lists(config: RamenConfig, sizes: list[int]) -> None:
    batches = torch.cat([TINY_IMAGES, TINY_IMAGES[:6].flip(-1)]).split(sizes)
    expected = literal_ramen(batches, config)
    ramen = Ramen(double_clip(), TINY_PROMPTS, config)
    ours = torch.cat([ramen.predict(part).logits for part in batches])
    torch.testing.assert_close(ours, expected)
    plain = ramen.logits(ramen.tower.start, torch.cat(batches)).float()
    assert not torch.allclose(ours, plain, atol=1e-3)
