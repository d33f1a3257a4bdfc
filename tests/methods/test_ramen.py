"""Ramen against lists and one image at a time on the model's own LayerNorms."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cliquetta.methods.ramen import Ramen, RamenConfig
from tests._helpers.live import Live, double_clip, entropies, flat, load_norms
from tests._helpers.tiny_world import TINY_IMAGES, TINY_PROMPTS


class Remembered(NamedTuple):
    """What is kept of an image."""

    label: int
    feature: Tensor
    gradient: Tensor
    entropy: float


def literal_ramen(batches: tuple[Tensor, ...], config: RamenConfig) -> Tensor:
    """Logits of a stream; the norms start again for each image."""
    live = Live()
    start = flat(live.norms)
    memory: list[Remembered] = []
    predictions = []

    def remember(image: Tensor) -> Remembered:
        feature = live.features(image[None])[0]
        logits = live.scale * live.text @ feature
        entropy = entropies(logits)
        gradient = flat(list(torch.autograd.grad(entropy, live.norms)))
        label = int(logits.argmax())
        return Remembered(label, feature.detach(), gradient, float(entropy.detach()))

    def step_for(feature: Tensor) -> Tensor:
        """The weighted gradients of the nearest images of every class."""
        step = torch.zeros_like(start)
        for c in range(len(live.text)):
            entries = []
            for entry in memory:
                if entry.label == c:
                    distance = float((entry.feature - feature).norm())
                    entries.append((distance, entry))
            entries.sort(key=lambda pair: pair[0])
            for distance, entry in entries[: config.neighbours]:
                doubt = entry.entropy + config.distance_weight * distance
                step += entry.gradient * math.exp(-doubt)
        return step

    for images in batches:
        newest = [remember(image) for image in images]
        memory += newest
        for image, entry in zip(images, newest, strict=True):
            step = step_for(entry.feature)
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
    mirrored = TINY_IMAGES[:6].flip(-1)
    stream = torch.cat([TINY_IMAGES, mirrored])
    batches = stream.split(sizes)
    expected = literal_ramen(batches, config)
    ramen = Ramen(double_clip(), TINY_PROMPTS, config)
    actual = torch.cat([ramen.predict(part).logits for part in batches])

    torch.testing.assert_close(actual, expected)
    # it moves: without a step the logits are others
    plain = ramen.logits(ramen.tower.start, stream).float()

    assert not torch.allclose(actual, plain, atol=1e-3)
