"""CoCoOp against a literal loop over images and classes."""

from collections.abc import Mapping
from functools import partial

import pytest
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
    """Every image has texts of its own: the context is shifted by a small network."""
    rows = []
    for feature in model.encode_image(images, normalize=True):
        # two layers with a ReLU
        hidden = learned["down.weight"] @ feature + learned["down.bias"]
        hidden = hidden.clamp(min=0)
        shift = learned["up.weight"] @ hidden + learned["up.bias"]
        context = [token + shift for token in learned["context"]]

        row = []
        for name in TINY_PROMPTS.names:
            inside = context + words(model, f"{name}.")
            cosine = feature @ text_feature(model, inside)
            row.append(model.scale * cosine)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def test_logits_and_gradients_are_those_of_the_literal_loop() -> None:
    model = build_tiny_clip().double()
    config = CoCoOpConfig(hidden_dim=6)
    start = initial_parameters(model, config, torch.Generator().manual_seed(1))
    tokens = prompt_tokens(model, TINY_PROMPTS, len(start["context"]))

    def ours(learned: Mapping[str, Tensor], images: Tensor) -> Tensor:
        features = model.encode_image(images, normalize=True)
        return cocoop_logits(model, tokens, learned, features, chunk=7)

    assert_same_logits(ours, partial(literal_logits, model), start)


def test_the_first_step_of_a_fit_is_sgd() -> None:
    config = CoCoOpConfig(lr=0.1)
    start = initial_parameters(TINY, config, torch.Generator().manual_seed(4))
    assert_first_step("cocoop", config, partial(literal_logits, TINY), start)


@pytest.mark.parametrize("rows", [1, 12])
def test_few_rows_at_a_time_change_nothing(rows: int) -> None:
    fitted = initial_parameters(TINY, CoCoOpConfig(), torch.Generator().manual_seed(0))
    images, _ = make_images(2, seed=0)

    def predict(text_chunk: int) -> Tensor:
        config = CoCoOpConfig(text_chunk=text_chunk)
        adapter = create_method("cocoop", TINY, TINY_PROMPTS, config, fitted=fitted)
        return adapter.predict(images).logits

    at_once = predict(2048)
    torch.testing.assert_close(predict(rows), at_once, atol=LOGIT, rtol=LOGIT)
