"""MaPLe against literal towers."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.fit import fit_method
from cliquetta.methods.building.registry import method_config
from cliquetta.methods.maple import (
    MaPLeConfig,
    initial_parameters,
    maple_logits,
    text_tokens,
)
from cliquetta.model.clip import CLIP
from tests._helpers.literal import (
    assert_first_step,
    assert_same_logits,
    text_feature,
    words,
)
from tests._helpers.literal_towers import all_features, image_features
from tests._helpers.separable import make_examples
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_PROMPTS


def literal_logits(
    model: CLIP, learned: Mapping[str, Tensor], pixels: Tensor
) -> Tensor:
    """The first two tokens are learned; other words, the name and the full stop stay."""
    textual = [learned["context"], *learned["deep"]]
    # tokens of images are those of texts, mapped layer by layer
    visual = []
    maps = zip(textual, learned["map.weight"], learned["map.bias"], strict=True)
    for tokens, weight, bias in maps:
        mapped = [weight @ token + bias for token in tokens]
        visual.append(torch.stack(mapped))

    texts = []
    for name in TINY_PROMPTS.names:
        fixed = words(model, f"a photo of a {name}.")[2:]
        inside = [*textual[0], *fixed]
        texts.append(text_feature(model, inside, deep=textual[1:]))

    features = all_features(image_features, model, pixels, tokens=visual)
    images = F.normalize(features, dim=-1)
    return model.scale * images @ torch.stack(texts).T


@pytest.mark.parametrize("depth", [1, 2])
def test_logits_and_gradients_are_those_of_the_literal_towers(depth: int) -> None:
    model = build_tiny_clip().double()
    config = MaPLeConfig(depth=depth)
    tokens = text_tokens(model, TINY_PROMPTS, config)
    start = initial_parameters(model, config, torch.Generator().manual_seed(1))
    ours = partial(maple_logits, model, tokens)
    literal = partial(literal_logits, model)
    assert_same_logits(ours, literal, start)


@pytest.mark.parametrize(
    ("preset", "depth", "lr", "epochs"),
    [("base_to_novel", 9, 3.5e-3, 5), ("cross_dataset", 3, 2.6e-3, 2)],
)
def test_presets_are_the_papers(
    preset: str, depth: int, lr: float, epochs: int
) -> None:
    config = method_config("maple", preset)
    assert config.depth == depth
    assert config.lr == lr
    assert config.epochs == epochs


def test_no_more_blocks_are_prompted_than_a_model_has() -> None:
    config = method_config("maple", "base_to_novel")
    start = initial_parameters(TINY, config, torch.Generator().manual_seed(0))
    # the tiny towers have two blocks
    assert start["map.weight"].shape == (2, 32, 32)


def test_the_first_step_of_a_fit_is_sgd() -> None:
    config = MaPLeConfig(lr=0.1)
    start = initial_parameters(TINY, config, torch.Generator().manual_seed(4))
    assert_first_step("maple", config, partial(literal_logits, TINY), start)


def test_tokens_stay_in_float32_beside_half_precision_weights() -> None:
    model = build_tiny_clip().bfloat16()
    config = MaPLeConfig(epochs=1)
    fitted = fit_method("maple", model, TINY_PROMPTS, make_examples(1), config).fitted

    assert {value.dtype for value in fitted.values()} == {torch.float32}


def test_more_learned_tokens_than_words_are_refused() -> None:
    config = MaPLeConfig(context_init="a photo", context_length=9)
    with pytest.raises(UserError, match="words"):
        text_tokens(TINY, TINY_PROMPTS, config)


def test_without_words_any_number_of_tokens_is_learned() -> None:
    config = MaPLeConfig(context_init="", context_length=9)
    ids, indices = text_tokens(TINY, TINY_PROMPTS, config)

    assert indices[0].tolist() == list(range(1, 10))

    end = int(ids[0].argmax())
    assert end > 10
