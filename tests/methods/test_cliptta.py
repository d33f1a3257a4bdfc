"""CLIPTTA's loss against loops over pairs, its steps and memory against a training loop."""

from __future__ import annotations

import torch
from torch import Tensor

from cliquetta.methods.cliptta import CLIPTTA, CLIPTTAConfig, soft_contrastive_loss
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.live_layernorms import double_clip, flat, open_norms, unit_rows


def literal_loss(v: Tensor, text: Tensor, scale: float) -> Tensor:
    """Entropies over the batch, image by image and text by text."""
    B = len(v)
    texts = [text[int((text @ f).argmax())] for f in v]
    loss = v.new_zeros(())
    for i in range(B):
        to_texts = torch.stack([scale * (v[i] @ texts[j]) for j in range(B)]).softmax(dim=0)
        to_images = torch.stack([scale * (texts[i] @ v[j]) for j in range(B)]).softmax(dim=0)
        for p in (to_texts, to_images):
            loss = loss - (p * p.log()).sum()
    return loss / B


def test_the_loss_equals_loops_over_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    v = unit_rows(torch.randn(7, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    text = unit_rows(torch.randn(4, 6, generator=generator, dtype=torch.float64))
    ours, literal = soft_contrastive_loss(10 * v @ text.T), literal_loss(v, text, 10)
    torch.testing.assert_close(ours, literal)
    (a,), (b,) = (torch.autograd.grad(loss, v, retain_graph=True) for loss in (ours, literal))
    torch.testing.assert_close(a, b)


def test_a_stream_equals_a_training_loop(tiny_prompts: ClassPrompts, tiny_images: Tensor) -> None:
    config = CLIPTTAConfig(lr=1e-3, steps=3, memory_shots=1)
    cliptta = CLIPTTA(double_clip(), tiny_prompts, config)
    live = double_clip()
    text = live.classifier(tiny_prompts)
    norms = open_norms(live.visual)
    optimiser = torch.optim.Adam(norms, lr=1e-3)
    remembered: dict[int, tuple[float, Tensor]] = {}
    for images in tiny_images.split([5, 5]):
        answer = cliptta.predict(Batch(images)).logits
        for _ in range(3):
            v = unit_rows(live.encode_image(images))
            loss = literal_loss(v, text, live.scale)
            if remembered:  # fewer than the batch has images: all of them are drawn
                kept = torch.stack([image for _, image in remembered.values()])
                again = unit_rows(live.encode_image(kept))
                loss = (loss + literal_loss(again, text, live.scale)) / 2
            mean = (live.scale * v @ text.T).softmax(dim=-1).mean(dim=0)
            optimiser.zero_grad()
            (loss + (mean * mean.log()).sum()).backward()
            optimiser.step()
        with torch.no_grad():
            logits = live.scale * unit_rows(live.encode_image(images)) @ text.T
        torch.testing.assert_close(answer, logits.float())
        for image, p in zip(images, logits.softmax(dim=-1), strict=True):
            best, label = float(p.max()), int(p.argmax())
            if best > remembered.get(label, (0.0, image))[0]:
                remembered[label] = (best, image)
    torch.testing.assert_close(cliptta.memory["norms.values"], flat(norms))
    for label, (_, image) in remembered.items():
        torch.testing.assert_close(cliptta.memory["images"][label, 0], image)


def test_without_memory_it_learns_from_the_batch_alone(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    cliptta = CLIPTTA(tiny_clip, tiny_prompts, CLIPTTAConfig(memory_shots=0))
    first, second = (cliptta.predict(Batch(tiny_images)).logits for _ in range(2))
    assert not torch.allclose(first, second, atol=1e-4)
    assert cliptta.memory["images"].numel() == 0
