"""BATCLIP's loss against loops over classes, its steps against a training loop on both towers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cliquetta.methods.batclip import (
    BATCLIP,
    BATCLIPConfig,
    batclip_loss,
    class_means,
    inter_class_separation,
    projection_matching,
)
from cliquetta.methods.registry import get_method
from cliquetta.methods.zero_shot import ZeroShot, ZeroShotConfig
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.live_layernorms import double_clip, flat, literal_entropy, open_norms, unit_rows


def literal_loss(logits: Tensor, features: Tensor, text: Tensor) -> Tensor:
    """One class, and one pair of classes, after the other."""
    labels = logits.argmax(dim=-1).tolist()
    means = {
        c: torch.stack([f for f, label in zip(features, labels, strict=True) if label == c]).mean(0)
        for c in set(labels)
    }
    matching = sum(mean @ text[c] for c, mean in means.items()) / len(means)
    apart = features.new_zeros(())
    for c, a in means.items():
        for d, b in means.items():
            if c != d:
                apart = apart + 1 - (a @ b) / (a.norm() * b.norm())
    return literal_entropy(logits) - matching - apart


@pytest.mark.parametrize("classes", [2, 5, 30])
def test_the_loss_equals_loops_over_classes(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    features = 3 * torch.randn(16, 8, generator=generator, dtype=torch.float64)
    features.requires_grad_()
    text = unit_rows(torch.randn(classes, 8, generator=generator, dtype=torch.float64))
    logits = 10 * unit_rows(features) @ text.T
    ours, literal = batclip_loss(logits, features, text), literal_loss(logits, features, text)
    torch.testing.assert_close(ours, literal)
    (ours_g,) = torch.autograd.grad(ours, features, retain_graph=True)
    (literal_g,) = torch.autograd.grad(literal, features)
    torch.testing.assert_close(ours_g, literal_g)


def test_features_enter_before_normalisation() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(6, 4, generator=generator)
    text = unit_rows(torch.randn(3, 4, generator=generator))
    labels = torch.tensor([0, 0, 2, 2, 2, 0])
    means, present = class_means(features, labels, 3)
    assert present.tolist() == [True, False, True]
    twice, _ = class_means(2 * features, labels, 3)
    matched = projection_matching(means, present, text)
    torch.testing.assert_close(projection_matching(twice, present, text), 2 * matched)
    # a long feature pulls the direction of its class mean; of unit features it could not
    pulled, _ = class_means(features * torch.tensor([9.0, 1, 1, 1, 1, 1])[:, None], labels, 3)
    before = inter_class_separation(means, present)
    assert not torch.allclose(inter_class_separation(pulled, present), before, atol=1e-2)


def test_a_stream_equals_a_training_loop(tiny_prompts: ClassPrompts, tiny_images: Tensor) -> None:
    batclip = BATCLIP(double_clip(), tiny_prompts, BATCLIPConfig())
    live = double_clip()
    images_norms, text_norms = open_norms(live.visual), open_norms(live.text)  # type: ignore[arg-type]
    optimiser = torch.optim.AdamW(images_norms + text_norms, lr=5e-4, weight_decay=0.01)
    for images in tiny_images.split([5, 2, 3]):
        answer = batclip.predict(Batch(images)).logits
        features = live.encode_image(images)
        parts = [unit_rows(live.encode_text(tiny_prompts.texts(t))) for t in tiny_prompts.templates]
        text = unit_rows(sum(parts))  # type: ignore[arg-type]
        logits = live.scale * unit_rows(features) @ text.T
        optimiser.zero_grad()
        literal_loss(logits, features, text).backward()
        optimiser.step()
        torch.testing.assert_close(answer, logits.detach().float())
    torch.testing.assert_close(batclip.memory["image_norms.values"], flat(images_norms))
    torch.testing.assert_close(batclip.memory["text_norms.values"], flat(text_norms))


def test_the_answer_is_given_before_the_step_and_both_towers_move(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    batclip = BATCLIP(tiny_clip, tiny_prompts, BATCLIPConfig())
    batch = Batch(tiny_images)
    text = batclip.classifier(batclip.memory["text_norms.values"])
    first, second = batclip.predict(batch), batclip.predict(batch)
    plain = ZeroShot(tiny_clip, tiny_prompts, ZeroShotConfig()).predict(batch).logits
    torch.testing.assert_close(first.logits, plain)
    assert not torch.allclose(second.logits, plain, atol=1e-3)
    assert float(second.evidence["loss"]) < float(first.evidence["loss"])
    assert not torch.allclose(batclip.classifier(batclip.memory["text_norms.values"]), text)


def test_fixed_text_is_refused_unless_asked_for(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    text = tiny_clip.classifier(tiny_prompts)
    fixed = ClassPrompts(tiny_prompts.names, features=text)
    with pytest.raises(ValueError, match="adapt_text=False"):
        BATCLIP(tiny_clip, fixed, BATCLIPConfig())
    one_sided = BATCLIP(tiny_clip, fixed, BATCLIPConfig(adapt_text=False))
    first, second = (one_sided.predict(Batch(tiny_images)).logits for _ in range(2))
    assert not torch.allclose(first, second, atol=1e-3)
    assert all(name.startswith("image_norms") for name in one_sided.state_dict())


def test_the_step_for_cifar_is_a_tuned_preset() -> None:
    entry = get_method("batclip")
    assert entry.config().lr == 5e-4
    assert entry.presets["cifar10"].lr == 1e-3
    assert entry.tuned_by_authors == {"cifar10"}
