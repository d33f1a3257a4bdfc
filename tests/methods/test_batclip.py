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
    predicted = logits.argmax(dim=-1)
    means = {}
    for c in predicted.unique().tolist():
        means[c] = features[predicted == c].mean(0)

    # means should be near the text of their class, and far from each other
    matching = features.new_zeros(())
    apart = features.new_zeros(())

    for c, a in means.items():
        matching = matching + a @ text[c]
        for d, b in means.items():
            if c != d:
                apart = apart + 1 - unit_rows(a) @ unit_rows(b)
    return entropies(logits).mean() - matching / len(means) - apart


def test_a_stream_equals_a_training_loop() -> None:
    batclip = BATCLIP(double_clip(), TINY_PROMPTS, BATCLIPConfig())
    live = double_clip()
    image_norms = open_norms(live.visual)
    text_norms = open_norms(live.require_text())
    optimiser = torch.optim.AdamW(image_norms + text_norms, lr=5e-4, weight_decay=0.01)

    for images in TINY_IMAGES.split([5, 2, 3]):
        prediction = batclip.predict(images).logits

        features = live.encode_image(images)
        text = torch.zeros(())
        for template in TINY_PROMPTS.templates:
            encoded = live.encode_text(TINY_PROMPTS.texts(template))
            text = text + unit_rows(encoded)
        text = unit_rows(text)
        logits = live.scale * unit_rows(features) @ text.T
        descend(optimiser, literal_loss(logits, features, text))

        torch.testing.assert_close(prediction, logits.detach().float())

    torch.testing.assert_close(batclip.memory["image_norms.values"], flat(image_norms))
    torch.testing.assert_close(batclip.memory["text_norms.values"], flat(text_norms))


FIXED = ClassPrompts(TINY_PROMPTS.names, features=TINY.classifier(TINY_PROMPTS))


def test_fixed_text_is_refused() -> None:
    with pytest.raises(ValueError, match="adapt_text"):
        BATCLIP(TINY, FIXED, BATCLIPConfig())


def test_fixed_text_serves_where_texts_are_not_adapted() -> None:
    one_sided = BATCLIP(TINY, FIXED, BATCLIPConfig(adapt_text=False))
    first = one_sided.predict(TINY_IMAGES).logits
    second = one_sided.predict(TINY_IMAGES).logits

    assert not torch.allclose(first, second, atol=1e-3)
    for name in one_sided.state_dict():
        assert name.startswith("image_norms")
