"""WATT against a training loop that loads, steps and averages the model's own LayerNorms."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.registry import create_method
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
    for round_ in range(rounds):
        reached = []
        load_norms(norms, average)
        for template in FEW:
            if mode == "parallel":
                load_norms(norms, average)
                if round_ == 0:
                    optimiser = torch.optim.Adam(norms, lr=1e-3)
            texts = unit_rows(
                model.encode_text([template.replace("{}", n) for n in TINY_NAMES])
            )
            for _ in range(2):
                v = unit_rows(model.encode_image(images))
                own = texts[(v @ texts.T).argmax(dim=-1)]
                descend(optimiser, literal_transductive_loss(v, own, model.scale, 0.01))
            reached.append(flat(norms))
        average = torch.stack(reached).mean(dim=0)
    return average


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_a_batch_equals_a_training_loop(mode: Any) -> None:
    images = TINY_IMAGES[:4]
    watt = WATT(
        double_clip(), TINY_PROMPTS, WATTConfig(mode=mode, rounds=2, templates=FEW)
    )
    expected = live_watt(double_clip(), images, mode, 2)
    torch.testing.assert_close(watt.adapt(images), expected)


def test_the_mean_of_its_own_templates_predicts_and_fixed_text_is_refused() -> None:
    own = ClassPrompts(TINY_NAMES, TEMPLATES)
    watt = WATT(TINY, ClassPrompts(TINY_NAMES), WATTConfig(rounds=1))
    torch.testing.assert_close(watt.classifier, TINY.classifier(own))
    prediction = watt.predict(TINY_IMAGES).logits
    plain = create_method("zero_shot", TINY, own).predict(TINY_IMAGES).logits
    assert not torch.allclose(
        prediction, plain, atol=1e-2
    )  # switched off it would be this
    with pytest.raises(UserError, match="names"):
        create_method(
            "watt", TINY, ClassPrompts(TINY_NAMES, features=TINY.classifier(own))
        )
