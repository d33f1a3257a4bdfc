"""Tent against a training loop on the model's own LayerNorms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cliquetta.methods.building.entropy import entropy
from cliquetta.methods.tent import Tent, TentConfig
from cliquetta.methods.zero_shot import ZeroShot, ZeroShotConfig
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.live_layernorms import double_clip, flat, literal_entropy, open_norms, unit_rows
from tests._helpers.tolerance import FEATURE


def test_a_stream_equals_a_training_loop(tiny_prompts: ClassPrompts, tiny_images: Tensor) -> None:
    tent = Tent(double_clip(), tiny_prompts, TentConfig())
    live = double_clip()
    text = live.classifier(tiny_prompts)
    norms = open_norms(live.visual)
    optimiser = torch.optim.Adam(norms, lr=1e-3, betas=(0.9, 0.999))
    for images in tiny_images.split([4, 3, 3]):
        answer = tent.predict(Batch(images)).logits
        logits = live.scale * unit_rows(live.encode_image(images)) @ text.T
        optimiser.zero_grad()
        literal_entropy(logits).backward()
        optimiser.step()
        torch.testing.assert_close(answer, logits.detach().float())
    torch.testing.assert_close(tent.memory["norms.values"], flat(norms))


def test_the_gradient_is_that_of_finite_differences(
    tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    tent = Tent(double_clip(), tiny_prompts, TentConfig())
    start = tent.tower.start
    tent.predict(Batch(tiny_images[:3]))
    gradient = tent.memory["norms.first"] / 0.1  # Adam's first moment after one step
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        way = torch.randn(start.shape, generator=generator, dtype=torch.float64)
        ends = [
            entropy(tent.logits(start + s * way, tiny_images[:3])).mean() for s in (1e-5, -1e-5)
        ]
        assert float((ends[0] - ends[1]) / 2e-5) == pytest.approx(
            float(gradient @ way), rel=FEATURE
        )


def test_the_answer_is_given_before_the_step_and_the_step_is_kept(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    tent = Tent(tiny_clip, tiny_prompts, TentConfig())
    batch = Batch(tiny_images)
    first, second = (tent.predict(batch).logits for _ in range(2))
    plain = ZeroShot(tiny_clip, tiny_prompts, ZeroShotConfig()).predict(batch).logits
    torch.testing.assert_close(first, plain)
    assert not torch.allclose(second, plain, atol=1e-3)


def test_predictions_become_more_certain(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    tent = Tent(tiny_clip, tiny_prompts, TentConfig())
    seen = [float(entropy(tent.predict(Batch(tiny_images)).logits).mean()) for _ in range(10)]
    assert seen[-1] < 0.95 * seen[0]
