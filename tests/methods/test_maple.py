"""MaPLe against literal towers, and what it is good for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.fit import fit_method
from cliquetta.methods.maple import MaPLeConfig, initial_parameters, maple_logits, text_tokens
from cliquetta.methods.registry import method_config
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.literal_features import cross_entropy, image_feature, text_feature
from tests._helpers.separable import FULL_IMAGE, make_examples, make_images
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_PROMPTS
from tests._helpers.tolerance import ADAPTED, DOUBLE, FEATURE, STEP


def literal_logits(
    model: CLIP, prompts: ClassPrompts, learned: dict[str, Tensor], pixels: Tensor
) -> Tensor:
    """The first two tokens are learned; other words, the name and the full stop stay."""
    tokenizer: Any = model.tokenizer
    embed = model.text.tokens.weight
    textual = [learned["context"], *learned["deep"]]
    visual = [
        torch.stack([weight @ token + bias for token in tokens])
        for tokens, weight, bias in zip(
            textual, learned["map.weight"], learned["map.bias"], strict=True
        )
    ]
    text = []
    for name in prompts.names:
        fixed = [embed[i] for i in tokenizer.encode(f"a photo of a {name}.")[2:]]
        sequence = [embed[tokenizer.start], *textual[0], *fixed, embed[tokenizer.end]]
        text.append(text_feature(model, torch.stack(sequence), deep=textual[1:]))
    images = [image_feature(model, image, visual) for image in pixels]
    return model.scale * torch.stack(images) @ torch.stack(text).T


@pytest.mark.parametrize("depth", [1, 2])
def test_logits_and_gradients_are_those_of_the_literal_towers(depth: int) -> None:
    model = build_tiny_clip().double()
    config = MaPLeConfig(depth=depth)
    start = initial_parameters(model, config, torch.Generator().manual_seed(1))
    fast = {name: value.double().requires_grad_() for name, value in start.items()}
    slow = {name: value.double().requires_grad_() for name, value in start.items()}
    images, labels = make_images(2, seed=0)
    logits = maple_logits(model, fast, text_tokens(model, TINY_PROMPTS, config), images.double())
    torch.nn.functional.cross_entropy(logits, labels).backward()
    expected = literal_logits(model, TINY_PROMPTS, slow, images.double())
    cross_entropy(expected, labels).backward()
    torch.testing.assert_close(logits, expected, atol=STEP, rtol=DOUBLE)
    for name in (name for name, value in start.items() if value.numel()):
        torch.testing.assert_close(fast[name].grad, slow[name].grad, atol=STEP, rtol=STEP)
        assert slow[name].grad.abs().max() > 1e-4, name


def test_the_first_step_of_a_fit_is_sgd() -> None:
    examples = make_examples(2)
    config = MaPLeConfig(epochs=1, warmup_epochs=0, lr=0.1, batch_size=4, crop_scale=FULL_IMAGE)
    fitted = fit_method("maple", TINY, TINY_PROMPTS, examples, config, seed=4).fitted
    start = initial_parameters(TINY, config, torch.Generator().manual_seed(4))
    learned = {name: value.requires_grad_() for name, value in start.items()}
    logits = literal_logits(TINY, TINY_PROMPTS, learned, examples.images)
    cross_entropy(logits, examples.labels).backward()
    for name, value in learned.items():
        step = value.grad + config.weight_decay * value.detach()
        torch.testing.assert_close(
            fitted[name], value.detach() - 0.1 * step, atol=FEATURE, rtol=ADAPTED
        )


def test_tokens_stay_in_float32_beside_half_precision_weights() -> None:
    model = build_tiny_clip().bfloat16()
    config = MaPLeConfig(epochs=1)
    fitted = fit_method("maple", model, TINY_PROMPTS, make_examples(1), config).fitted
    assert {value.dtype for value in fitted.values()} == {torch.float32}


def test_presets_and_depth() -> None:
    deep, transfer = (method_config("maple", p) for p in ("base_to_novel", "cross_dataset"))
    assert (deep.depth, deep.lr, deep.epochs) == (9, 3.5e-3, 5)
    assert (transfer.depth, transfer.lr, transfer.epochs) == (3, 2.6e-3, 2)
    start = initial_parameters(TINY, deep, torch.Generator().manual_seed(0))
    assert start["map.weight"].shape == (2, 32, 32)  # the tiny towers have two blocks


def test_more_learned_tokens_than_words_are_refused() -> None:
    with pytest.raises(ValueError, match="more words or none"):
        text_tokens(TINY, TINY_PROMPTS, MaPLeConfig(context_init="a photo", context_length=9))
    ids, indices = text_tokens(TINY, TINY_PROMPTS, MaPLeConfig(context_init="", context_length=9))
    assert indices.tolist()[0] == list(range(1, 10))
    assert int(ids[0].argmax()) > 10
