"""SAR against a training loop with two passes on the model's own LayerNorms."""

import math

import pytest
import torch

from cliquetta.methods.building.layernorm import LayerNormTower
from cliquetta.methods.sar import SAR, SARConfig
from cliquetta.model.config import VisionConfig
from cliquetta.model.vision import VisionTower
from tests._helpers.live import Live, double_clip, entropies, flat
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS
from tests._helpers.tolerance import STEP

LIVELY = SARConfig(entropy_threshold=0.75, lr=0.8)
"""A threshold that lets some of the random tiny CLIP's predictions pass, and stops others."""


def test_a_stream_equals_two_passes() -> None:
    sar = SAR(double_clip(), TINY_PROMPTS, LIVELY)
    live = Live()
    early = live.norms[:-2]  # two blocks: only the final norm is late
    optimiser = torch.optim.SGD(early, lr=LIVELY.lr, momentum=0.9)
    limit = 0.75 * math.log(len(live.text))
    average = 0.0
    seen = 0
    for images in TINY_IMAGES.split([4, 3, 3]):
        sar.predict(images)
        optimiser.param_groups[0]["lr"] = LIVELY.lr * len(images) / 64
        h = entropies(live.logits(images))
        reliable = h < limit
        seen += int(reliable.sum())
        optimiser.zero_grad()
        h[reliable].mean().backward()
        size = torch.stack([p.grad.norm() for p in early]).norm()
        before = [p.detach().clone() for p in early]
        with torch.no_grad():
            for p in early:
                p.add_(p.grad * (0.05 / size))
        optimiser.zero_grad()
        second = entropies(live.logits(images))[reliable]
        loss = second[second < limit].mean()
        loss.backward()
        with torch.no_grad():
            for p, old in zip(early, before, strict=True):
                p.copy_(old)
        optimiser.step()
        value = float(loss.detach())
        average = 0.9 * average + 0.1 * value if average else value

    assert 0 < seen < 10
    torch.testing.assert_close(sar.memory["norms"], flat(live.norms))
    assert abs(float(sar.memory["average"]) - average) < STEP


def test_a_collapse_resets_the_norms_alone() -> None:
    """Every loss is below a threshold this high; as in the official code the rest stays."""

    def adapt(reset_threshold: float) -> SAR:
        config = SARConfig(entropy_threshold=0.75, reset_threshold=reset_threshold)
        sar = SAR(TINY, TINY_PROMPTS, config)
        sar.predict(TINY_IMAGES)
        return sar

    high = adapt(100.0)
    none = adapt(0.0)

    assert torch.equal(high.memory["norms"], high.tower.start)
    assert not torch.equal(none.memory["norms"], none.tower.start)
    assert high.memory["velocity"].any()
    assert torch.equal(high.memory["velocity"], none.memory["velocity"])
    assert torch.equal(high.memory["average"], none.memory["average"])


def test_without_reliable_images_only_momentum_moves() -> None:
    sar = SAR(TINY, TINY_PROMPTS, SARConfig(entropy_threshold=0.75, momentum=0.5))
    sar.predict(TINY_IMAGES)
    before = sar.state_dict()

    sar.threshold = 0.0
    sar.predict(TINY_IMAGES[:4])
    velocity = 0.5 * before["velocity"]
    rate = 1e-3 * 4 / 64
    moved = before["norms"] - rate * velocity

    torch.testing.assert_close(sar.memory["velocity"], velocity)
    torch.testing.assert_close(sar.memory["norms"], moved)
    assert torch.equal(sar.memory["average"], before["average"])


@pytest.mark.parametrize(
    ("images", "rate"),
    [(1, 2e-3 / 64), (2, 2e-3 / 64), (64, 1e-3), (128, 2e-3)],
)
def test_the_rate_follows_the_batch(images: int, rate: float) -> None:
    """main.py of the official code: (0.001 / 64) * batch size, doubled for batches of one."""
    sar = SAR(double_clip(), TINY_PROMPTS, SARConfig())
    sar.step(torch.ones_like(sar.mask), images)
    moved = sar.tower.start - sar.memory["norms"]

    torch.testing.assert_close(moved, rate * sar.mask)


def test_the_last_quarter_of_the_blocks_is_left_out() -> None:
    """Two of eight blocks, and the final norm; those before the first block are learned."""
    vision = VisionConfig(
        image_size=32, patch_size=16, width=8, layers=8, heads=2, hidden=16
    )
    early = LayerNormTower(VisionTower(vision, 8)).early()
    mask = early.view(-1, 8)[:, 0]
    # ln_pre, six blocks of two norms that are learned, two that are not, ln_post: gain
    # and bias of each
    learned = [1.0] * 2 + [1.0] * 24
    left_out = [0.0] * 8 + [0.0] * 2

    assert mask.tolist() == learned + left_out
