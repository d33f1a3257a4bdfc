"""CoOp against a literal text tower, and its contexts for other classes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.coop import CoOpConfig, coop_logits, prompt_tokens
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.literal import (
    assert_first_step,
    assert_same_logits,
    text_feature,
    words,
)
from tests._helpers.separable import make_images
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_PROMPTS, draw

WORDS = "a photo of a"


def literal_logits(
    model: CLIP, learned: Mapping[str, Tensor], images: Tensor, position: str = "end"
) -> Tensor:
    """Texts put together token by token, with one context for all classes or one for each."""
    context = learned["context"]
    texts = []
    for row, name in enumerate(TINY_PROMPTS.names):
        own = words(model, name)
        learnable = list(context if context.ndim == 2 else context[row])
        half = len(learnable) // 2
        inside = {
            "end": [*learnable, *own],
            "middle": [*learnable[:half], *own, *learnable[half:]],
            "front": [*own, *learnable],
        }[position]
        stop = words(model, ".")
        texts.append(text_feature(model, inside + stop))

    features = model.encode_image(images, normalize=True)
    return model.scale * features @ torch.stack(texts).T


@pytest.mark.parametrize("position", ["end", "middle", "front"])
@pytest.mark.parametrize("shape", [(3, 32), (5, 3, 32)])
def test_logits_and_gradient_are_those_of_the_literal_tower(
    position: Any, shape: Any
) -> None:
    model = build_tiny_clip().double()
    tokens = prompt_tokens(model, TINY_PROMPTS, 3, position)

    def ours(learned: Mapping[str, Tensor], images: Tensor) -> Tensor:
        features = model.encode_image(images, normalize=True)
        return coop_logits(model, tokens, learned, features)

    literal = partial(literal_logits, model, position=position)
    assert_same_logits(ours, literal, {"context": draw(*shape, seed=3)})


def test_the_first_step_of_a_fit_is_sgd_with_weight_decay() -> None:
    config = CoOpConfig(context_init=WORDS, lr=0.3, weight_decay=0.2)
    start = {"context": TINY.context(WORDS)}
    assert_first_step("coop", config, partial(literal_logits, TINY), start)


def test_words_at_the_start_are_zero_shot() -> None:
    prompts = ClassPrompts(("airplane", "polar_bear"))
    images, _ = make_images(2, seed=0)
    start = {"context": TINY.context(WORDS)}
    coop = create_method("coop", TINY, prompts, fitted=start)
    actual = coop.predict(images).logits

    zero_shot = create_method("zero_shot", TINY, prompts)
    expected = zero_shot.predict(images).logits
    torch.testing.assert_close(actual, expected)


def test_a_context_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(UserError, match="tokens"):
        prompt_tokens(TINY, TINY_PROMPTS, 30)
