"""WATT against a training loop that loads, steps and averages the model's own LayerNorms."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.watt import TEMPLATES, WATT, WATTConfig
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.live import (
    descend,
    double_clip,
    flat,
    literal_transductive_loss,
    load_norms,
    open_norms,
    unit_rows,
)
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS

FEW = ("a photo of a {}", "art of the {}.", "a {} in a video game.")


def live_watt(model: CLIP, images: Tensor, mode: str, rounds: int) -> Tensor:
    """Flat norms after all rounds of two steps per template."""
    norms = open_norms(model.visual)
    optimiser = torch.optim.Adam(norms, lr=1e-3)
    average = flat(norms)

    for number in range(rounds):
        reached = []
        load_norms(norms, average)
        for template in FEW:
            # in parallel every template starts from the average
            if mode == "parallel":
                load_norms(norms, average)
                if number == 0:
                    optimiser = torch.optim.Adam(norms, lr=1e-3)
            sentences = [template.replace("{}", name) for name in TINY_NAMES]
            texts = unit_rows(model.encode_text(sentences))
            for _ in range(2):
                v = unit_rows(model.encode_image(images))
                labels = (v @ texts.T).argmax(dim=-1)
                own = texts[labels]
                loss = literal_transductive_loss(v, own, model.scale, 0.01)
                descend(optimiser, loss)
            reached.append(flat(norms))
        average = torch.stack(reached).mean(dim=0)
    return average


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_a_batch_equals_a_training_loop(mode: Any) -> None:
    images = TINY_IMAGES[:4]
    config = WATTConfig(mode=mode, rounds=2, templates=FEW)
    watt = WATT(double_clip(), TINY_PROMPTS, config)
    expected = live_watt(double_clip(), images, mode, rounds=2)

    torch.testing.assert_close(watt.adapt(images), expected)


def test_the_mean_of_its_own_templates_predicts() -> None:
    own = ClassPrompts(TINY_NAMES, TEMPLATES)
    watt = WATT(TINY, ClassPrompts(TINY_NAMES), WATTConfig(rounds=1))

    torch.testing.assert_close(watt.classifier, TINY.classifier(own))
    prediction = watt.predict(TINY_IMAGES).logits
    # switched off it would be this
    plain = create_method("zero_shot", TINY, own).predict(TINY_IMAGES).logits

    assert not torch.allclose(prediction, plain, atol=1e-2)


def test_fixed_text_is_refused() -> None:
    fixed = ClassPrompts(TINY_NAMES, features=TINY.classifier(TINY_PROMPTS))
    with pytest.raises(UserError, match="names"):
        create_method("watt", TINY, fixed)


def test_defaults_are_those_of_the_sequential_variant() -> None:
    """l = 2 steps under each template, m = 5 rounds, templates one after the other."""
    config = WATTConfig()
    assert config.mode == "sequential"
    assert config.steps == 2
    assert config.rounds == 5
