"""CoCoOp against a literal loop over images and classes."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from cliquetta.methods.building.registry import create_method
from cliquetta.methods.cocoop import CoCoOpConfig, cocoop_logits, initial_parameters
from cliquetta.methods.coop import prompt_tokens
from cliquetta.model.clip import CLIP
from tests._helpers.literal import (
    assert_first_step,
    assert_same_logits,
    text_feature,
    words,
)
from tests._helpers.separable import make_images
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_PROMPTS
from tests._helpers.tolerance import LOGIT


def literal_logits(
    model: CLIP, learned: Mapping[str, Tensor], images: Tensor
) -> Tensor:
    rows = []
    for feature in model.encode_image(images, normalize=True):
        hidden = (learned["down.weight"] @ feature + learned["down.bias"]).clamp(min=0)
        shift = learned["up.weight"] @ hidden + learned["up.bias"]
        context = [token + shift for token in learned["context"]]
        texts = [[*context, *words(model, f"{name}.")] for name in TINY_PROMPTS.names]
        row = [model.scale * feature @ text_feature(model, text) for text in texts]
        rows.append(torch.stack(row))
    return torch.stack(rows)


def test_logits_and_gradients_are_those_of_the_literal_loop() -> None:
    model = build_tiny_clip().double()
    start = initial_parameters(
        model, CoCoOpConfig(hidden_dim=6), torch.Generator().manual_seed(1)
    )
    tokens = prompt_tokens(model, TINY_PROMPTS, len(start["context"]))

    def ours(learned: Mapping[str, Tensor], images: Tensor) -> Tensor:
        features = model.encode_image(images, normalize=True)
        return cocoop_logits(model, tokens, learned, features, chunk=7)

    assert_same_logits(ours, partial(literal_logits, model), start)


def test_the_first_step_of_a_fit_is_sgd() -> None:
    config = CoCoOpConfig(lr=0.1)
    start = initial_parameters(TINY, config, torch.Generator().manual_seed(4))
    assert_first_step("cocoop", config, partial(literal_logits, TINY), start)


def test_few_rows_at_a_time_change_nothing() -> None:
    fitted = initial_parameters(TINY, CoCoOpConfig(), torch.Generator().manual_seed(0))
    configs = [CoCoOpConfig(text_chunk=rows) for rows in (2048, 1, 12)]
    expected, *predictions = (
        create_method("cocoop", TINY, TINY_PROMPTS, config, fitted=fitted)
        .predict(make_images(2, seed=0)[0])
        .logits
        for config in configs
    )
    for prediction in predictions:
        torch.testing.assert_close(prediction, expected, atol=LOGIT, rtol=LOGIT)
