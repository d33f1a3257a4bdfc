"""Ramen against lists for queues and one image at a time on the model's own LayerNorms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cliquetta.methods.ramen import Ramen, RamenConfig
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.live_layernorms import double_clip, flat, open_norms, unit_rows
from tests._helpers.tolerance import LOGIT


def literal_ramen(images: Tensor, prompts: ClassPrompts, config: RamenConfig) -> Tensor:
    """Logits, one image after the other; the norms start again for each."""
    queues: dict[int, list[tuple[Tensor, Tensor, float]]] = {}
    answers = []
    for image in images:
        live = double_clip()
        text = live.classifier(prompts)
        norms = open_norms(live.visual)
        z = unit_rows(live.encode_image(image[None]))[0]
        p = (live.scale * text @ z).softmax(dim=-1)
        entropy = -(p * p.log()).sum()
        gradient = flat(list(torch.autograd.grad(entropy, norms)))
        queue = queues.setdefault(int(p.argmax()), [])
        queue.append((z.detach(), gradient, float(entropy.detach())))
        del queue[: -config.capacity]
        step = torch.zeros_like(gradient)
        for entries in queues.values():
            near = sorted(entries, key=lambda entry: -float(entry[0] @ z.detach()))
            for other, g, h in near[: config.neighbours]:
                distance = float((z.detach() - other).norm())
                step += torch.exp(torch.tensor(-h - config.distance_weight * distance)) * g
        moved = torch.nn.Parameter(flat(norms))
        moved.grad = step
        torch.optim.Adam([moved], lr=config.lr).step()
        with torch.no_grad():
            at = 0
            for norm in norms:
                norm.copy_(moved[at : at + norm.numel()].view_as(norm))
                at += norm.numel()
            answers.append(live.scale * text @ unit_rows(live.encode_image(image[None]))[0])
    return torch.stack(answers).float()


@pytest.mark.parametrize(
    "config",
    [
        RamenConfig(),
        RamenConfig(capacity=2, neighbours=1, distance_weight=0.5),  # queues overflow
    ],
)
@pytest.mark.parametrize("sizes", [[10, 6], [1] * 16])
def test_a_stream_equals_one_image_at_a_time(
    tiny_prompts: ClassPrompts, tiny_images: Tensor, config: RamenConfig, sizes: list[int]
) -> None:
    images = torch.cat([tiny_images, tiny_images[:6].flip(-1)])
    expected = literal_ramen(images, tiny_prompts, config)
    ramen = Ramen(double_clip(), tiny_prompts, config)
    ours = torch.cat([ramen.predict(Batch(part)).logits for part in images.split(sizes)])
    torch.testing.assert_close(ours, expected, atol=LOGIT, rtol=LOGIT)
    plain = ramen.logits(ramen.tower.start, images).float()
    assert not torch.allclose(ours, plain, atol=1e-3)


def test_gradients_are_per_image(tiny_prompts: ClassPrompts, tiny_images: Tensor) -> None:
    """The tower with parameters per image gives each image's own gradient in one pass."""
    ramen = Ramen(double_clip(), tiny_prompts, RamenConfig())
    stacked = ramen.tower.start.expand(3, -1).detach().requires_grad_()
    (together,) = torch.autograd.grad(ramen.logits(stacked, tiny_images[:3]).sum(), stacked)
    for row in range(3):
        one = ramen.tower.start.detach().clone().requires_grad_()
        (alone,) = torch.autograd.grad(ramen.logits(one, tiny_images[row : row + 1]).sum(), one)
        torch.testing.assert_close(together[row], alone)
