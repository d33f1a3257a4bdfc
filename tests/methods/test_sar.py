"""SAR against a training loop with two passes on the model's own LayerNorms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cliquetta.methods._shared.layernorm import LayerNormTower
from cliquetta.methods.sar import SAR, SARConfig
from cliquetta.model.clip import CLIP
from cliquetta.model.config import VisionConfig
from cliquetta.model.vision import VisionTower
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.live_layernorms import double_clip, flat, open_norms, unit_rows
from tests._helpers.tolerance import STEP

LIVELY = SARConfig(entropy_threshold=0.75, lr=0.05)
"""A threshold that lets some of the random tiny CLIP's answers pass, and stops others."""


def entropies(live: CLIP, images: Tensor, text: Tensor) -> Tensor:
    p = (live.scale * unit_rows(live.encode_image(images)) @ text.T).softmax(dim=-1)
    return -(p * p.log()).sum(dim=-1)


def test_a_stream_equals_two_passes(tiny_prompts: ClassPrompts, tiny_images: Tensor) -> None:
    sar = SAR(double_clip(), tiny_prompts, LIVELY)
    live = double_clip()
    text = live.classifier(tiny_prompts)
    norms = open_norms(live.visual)
    early = norms[:-2]  # two blocks: only the final norm is late
    optimiser = torch.optim.SGD(early, lr=0.05, momentum=0.9)
    limit = 0.75 * math.log(len(text))
    average, seen = None, 0
    for images in tiny_images.split([4, 3, 3]):
        sar.predict(Batch(images))
        h = entropies(live, images, text)
        reliable = h < limit
        seen += int(reliable.sum())
        optimiser.zero_grad()
        h[reliable].mean().backward()
        size = torch.stack([p.grad.norm() for p in early if p.grad is not None]).norm()
        before = [p.detach().clone() for p in early]
        with torch.no_grad():
            for p in early:
                assert p.grad is not None
                p.add_(p.grad, alpha=float(0.05 / size))
        optimiser.zero_grad()
        second = entropies(live, images, text)[reliable]
        loss = second[second < limit].mean()
        loss.backward()
        with torch.no_grad():
            for p, old in zip(early, before, strict=True):
                p.copy_(old)
        optimiser.step()
        value = float(loss.detach())
        average = value if average is None else 0.9 * average + 0.1 * value
    assert 0 < seen < 10
    torch.testing.assert_close(sar.memory["norms"], flat(norms))
    assert abs(float(sar.memory["average"]) - float(average or 0)) < STEP


def test_collapse_starts_again(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    """Every loss is below a threshold this high: what a batch teaches is dropped at once."""
    config = SARConfig(entropy_threshold=0.75, reset_threshold=100.0)
    sar = SAR(tiny_clip, tiny_prompts, config)
    sar.predict(Batch(tiny_images))
    assert torch.equal(sar.memory["norms"], sar.tower.start)
    assert not sar.memory["average"].isfinite()
    kept = SAR(tiny_clip, tiny_prompts, SARConfig(entropy_threshold=0.75, reset_threshold=0.0))
    kept.predict(Batch(tiny_images))
    assert not torch.equal(kept.memory["norms"], kept.tower.start)


def test_nothing_is_learned_if_no_image_is_reliable(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    sar = SAR(tiny_clip, tiny_prompts, SARConfig(entropy_threshold=0.0))
    sar.predict(Batch(tiny_images))
    assert torch.equal(sar.memory["norms"], sar.tower.start)


def test_the_last_quarter_of_the_blocks_is_left_out() -> None:
    """Of eight blocks two, and the final norm; those before the first block are learned."""
    vision = VisionConfig(image_size=32, patch_size=16, width=8, layers=8, heads=2, hidden=16)
    mask = LayerNormTower(VisionTower(vision, 8)).early().view(-1, 8)[:, 0]
    # ln_pre, eight blocks of two norms, ln_post: gain and bias of each
    assert mask.tolist() == [1.0] * 2 + [1.0] * 24 + [0.0] * 8 + [0.0] * 2
