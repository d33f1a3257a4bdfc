"""WATT against a training loop that loads, steps and averages the model's own LayerNorms."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.watt import TEMPLATES, WATT, WATTConfig
from cliquetta.methods.zero_shot import ZeroShot, ZeroShotConfig
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.live_layernorms import (
    double_clip,
    flat,
    literal_transductive_loss,
    load_norms,
    open_norms,
    unit_rows,
)
from tests._helpers.tiny import TINY_NAMES

FEW = ("a photo of a {}", "art of the {}.", "a {} in a video game.")


def live_watt(model: CLIP, images: Tensor, mode: str, rounds: int) -> Tensor:
    """Flat norms after all rounds of two steps per template."""
    norms = open_norms(model.visual)
    start = flat(norms)
    fresh = torch.optim.Adam(norms, lr=1e-3).state_dict()
    optimiser = torch.optim.Adam(norms, lr=1e-3)
    average = start
    for round_ in range(rounds):
        reached = []
        load_norms(norms, average)
        for template in FEW:
            if mode == "parallel":
                load_norms(norms, average)
                if round_ == 0:
                    optimiser = torch.optim.Adam(norms, lr=1e-3)
                    optimiser.load_state_dict(fresh)
            texts = unit_rows(model.encode_text([template.replace("{}", n) for n in TINY_NAMES]))
            for _ in range(2):
                v = unit_rows(model.encode_image(images))
                own = texts[(v @ texts.T).argmax(dim=-1)]
                optimiser.zero_grad()
                literal_transductive_loss(v, own, model.scale, 0.01).backward()
                optimiser.step()
            reached.append(flat(norms))
        average = torch.stack(reached).mean(dim=0)
    return average


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_a_batch_equals_a_training_loop(
    tiny_prompts: ClassPrompts, tiny_images: Tensor, mode: Any
) -> None:
    images = tiny_images[:4]
    watt = WATT(double_clip(), tiny_prompts, WATTConfig(mode=mode, rounds=2, templates=FEW))
    expected = live_watt(double_clip(), images, mode, 2)
    torch.testing.assert_close(watt.adapt(images), expected)


def test_the_mean_of_its_own_templates_predicts(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    watt = WATT(tiny_clip, tiny_prompts, WATTConfig(rounds=1))
    own = ClassPrompts(tiny_prompts.names, TEMPLATES)
    torch.testing.assert_close(watt.classifier, tiny_clip.classifier(own))
    prediction = watt.predict(Batch(tiny_images)).logits
    plain = ZeroShot(tiny_clip, own, ZeroShotConfig()).predict(Batch(tiny_images)).logits
    assert not torch.allclose(prediction, plain, atol=1e-2)  # switched off it would be this


def test_fixed_text_is_refused(tiny_clip: CLIP, tiny_prompts: ClassPrompts) -> None:
    fixed = ClassPrompts(tiny_prompts.names, features=tiny_clip.classifier(tiny_prompts))
    with pytest.raises(ValueError, match="names only"):
        WATT(tiny_clip, fixed, WATTConfig())
