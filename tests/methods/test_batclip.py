"""BATCLIP's loss against loops over classes, its steps against a training loop on both towers."""

import pytest
import torch
from torch import Tensor

from cliquetta.methods.batclip import BATCLIP, BATCLIPConfig
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.live import (
    descend,
    double_clip,
    entropies,
    flat,
    open_norms,
    unit_rows,
)
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS


def literal_loss(logits: Tensor, features: Tensor, text: Tensor) -> Tensor:
    """One class, and one pair of classes, after the other."""
    labels = logits.argmax(dim=-1).tolist()
    means = {
        c: torch.stack(
            [f for f, label in zip(features, labels, strict=True) if label == c]
        ).mean(0)
        for c in set(labels)
    }
    matching = sum(mean @ text[c] for c, mean in means.items()) / len(means)
    apart = features.new_zeros(())
    for c, a in means.items():
        for d, b in means.items():
            if c != d:
                apart = apart + 1 - (a @ b) / (a.norm() * b.norm())
    return entropies(logits).mean() - matching - apart


def test_a_stream_equals_a_training_loop() -> None:
    batclip = BATCLIP(double_clip(), TINY_PROMPTS, BATCLIPConfig())
    live = double_clip()
    images_norms = open_norms(live.visual)
    text_norms = open_norms(live.require_text())
    optimiser = torch.optim.AdamW(images_norms + text_norms, lr=5e-4, weight_decay=0.01)
    for images in TINY_IMAGES.split([5, 2, 3]):
        prediction = batclip.predict(images).logits
        features = live.encode_image(images)
        parts = [
            unit_rows(live.encode_text(TINY_PROMPTS.texts(t)))
            for t in TINY_PROMPTS.templates
        ]
        text = unit_rows(sum(parts))  # type: ignore[arg-type]
        logits = live.scale * unit_rows(features) @ text.T
        descend(optimiser, literal_loss(logits, features, text))
        torch.testing.assert_close(prediction, logits.detach().float())
    torch.testing.assert_close(batclip.memory["image_norms.values"], flat(images_norms))
    torch.testing.assert_close(batclip.memory["text_norms.values"], flat(text_norms))


def test_fixed_text_is_refused_unless_texts_are_not_adapted() -> None:
    fixed = ClassPrompts(TINY_PROMPTS.names, features=TINY.classifier(TINY_PROMPTS))
    with pytest.raises(ValueError, match="adapt_text"):
        BATCLIP(TINY, fixed, BATCLIPConfig())
    one_sided = BATCLIP(TINY, fixed, BATCLIPConfig(adapt_text=False))
    first = one_sided.predict(TINY_IMAGES).logits
    second = one_sided.predict(TINY_IMAGES).logits
    assert not torch.allclose(first, second, atol=1e-3)
    assert all(name.startswith("image_norms") for name in one_sided.state_dict())
