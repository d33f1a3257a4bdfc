"""CoOp against a literal text tower, and what its fitted context is good for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.coop import CoOpConfig, coop_logits, prompt_tokens
from cliquetta.methods.fit import fit_method
from cliquetta.methods.registry import create_method
from cliquetta.methods.state import load_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.literal_features import cross_entropy, text_feature
from tests._helpers.separable import FULL_IMAGE, make_examples, make_images
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_PROMPTS
from tests._helpers.tolerance import DOUBLE, FEATURE, LOGIT, STEP

FAST = CoOpConfig(context_init="a photo of a", epochs=20, lr=0.1, crop_scale=(0.6, 1.0))


def literal_prompt(model: CLIP, name: str, context: Tensor, position: str) -> Tensor:
    """Embedded sequence of one class, put together token by token."""
    tokenizer: Any = model.tokenizer
    embed = model.text.tokens.weight
    own = [embed[i] for i in tokenizer.encode(name)]
    stop = [embed[i] for i in tokenizer.encode(".")]
    learned = list(context)
    half = len(learned) // 2
    middle = {
        "end": [*learned, *own],
        "middle": [*learned[:half], *own, *learned[half:]],
        "front": [*own, *learned],
    }[position]
    return torch.stack([embed[tokenizer.start], *middle, *stop, embed[tokenizer.end]])


def literal_logits(
    model: CLIP, prompts: ClassPrompts, context: Tensor, features: Tensor, position: str
) -> Tensor:
    rows = [context] * len(prompts) if context.ndim == 2 else list(context)
    text = [
        text_feature(model, literal_prompt(model, name, row, position))
        for name, row in zip(prompts.names, rows, strict=True)
    ]
    return model.scale * features @ torch.stack(text).T


@pytest.mark.parametrize("position", ["end", "middle", "front"])
@pytest.mark.parametrize("class_specific", [False, True])
def test_logits_and_gradient_are_those_of_the_literal_tower(
    position: Any, class_specific: bool
) -> None:
    model = build_tiny_clip().double()
    shape = (len(TINY_PROMPTS), 3, 32) if class_specific else (3, 32)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(3)).double()
    images, labels = make_images(2, seed=0)
    features = model.encode_image(images.double(), normalize=True)
    fast, slow = start.clone().requires_grad_(), start.clone().requires_grad_()
    logits = coop_logits(model, fast, prompt_tokens(model, TINY_PROMPTS, 3, position), features)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    expected = literal_logits(model, TINY_PROMPTS, slow, features, position)
    cross_entropy(expected, labels).backward()
    torch.testing.assert_close(logits, expected, atol=STEP, rtol=DOUBLE)
    torch.testing.assert_close(fast.grad, slow.grad, atol=STEP, rtol=STEP)
    assert slow.grad.abs().max() > 1e-3


def test_the_first_step_of_a_fit_is_sgd_with_weight_decay() -> None:
    examples = make_examples(2)
    config = CoOpConfig(
        context_init="a photo of a",
        epochs=1,
        warmup_epochs=0,
        lr=0.3,
        weight_decay=0.2,
        crop_scale=FULL_IMAGE,
    )
    fitted = fit_method("coop", TINY, TINY_PROMPTS, examples, config).fitted["context"]
    start = TINY.context("a photo of a").requires_grad_()
    features = TINY.encode_image(examples.images, normalize=True)
    logits = literal_logits(TINY, TINY_PROMPTS, start, features, "end")
    cross_entropy(logits, examples.labels).backward()
    expected = start.detach() - 0.3 * (start.grad + 0.2 * start.detach())
    torch.testing.assert_close(fitted, expected, atol=FEATURE, rtol=LOGIT)


def test_words_at_the_start_are_zero_shot() -> None:
    prompts = ClassPrompts(("airplane", "polar_bear"))
    context = {"context": TINY.context("a photo of a")}
    images = make_images(2, seed=0)[0]
    adapter = create_method("coop", TINY, prompts, fitted=context)
    plain = create_method("zero_shot", TINY, prompts)
    torch.testing.assert_close(adapter.predict(images).logits, plain.predict(images).logits)


def test_class_specific_contexts_follow_their_class_and_no_other(tmp_path: Path) -> None:
    config = replace(FAST, epochs=1, class_specific=True)
    adapter = fit_method("coop", TINY, TINY_PROMPTS, make_examples(), config)
    path = tmp_path / "coop.safetensors"
    adapter.save(path)
    images = Batch(make_images(2, seed=0)[0])
    full = load_method(path, TINY, TINY_PROMPTS).predict(images).logits
    some = ClassPrompts((TINY_PROMPTS.names[3], TINY_PROMPTS.names[1]))
    part = load_method(path, TINY, some).predict(images).logits
    torch.testing.assert_close(part, full[:, [3, 1]])
    with pytest.raises(ValueError, match=r"deer.*fit it again"):
        load_method(path, TINY, ClassPrompts(("deer", "frog")))


def test_a_context_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer context tokens"):
        prompt_tokens(TINY, TINY_PROMPTS, 30)
