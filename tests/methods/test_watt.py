"""WATT against a training loop that loads, steps and averages the model's own LayerNorms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.registry import get_method
from cliquetta.methods.watt import TEMPLATES, WATT, WATTConfig
from cliquetta.methods.zero_shot import ZeroShot, ZeroShotConfig
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.live_layernorms import (
    double_clip,
    flat,
    literal_transductive_loss,
    open_norms,
    unit_rows,
)
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tolerance import ADAPTED

FEW = ("a photo of a {}", "art of the {}.", "a {} in a video game.")


def load(norms: Sequence[Tensor], values: Tensor) -> None:
    with torch.no_grad():
        for norm, part in zip(norms, values.split([n.numel() for n in norms]), strict=True):
            norm.copy_(part.view_as(norm))


def live_watt(model: CLIP, images: Tensor, mode: str, rounds: int) -> Tensor:
    """Flat norms after all rounds of two steps per template."""
    norms = open_norms(model.visual)
    start = flat(norms)
    fresh = torch.optim.Adam(norms, lr=1e-3).state_dict()
    optimiser = torch.optim.Adam(norms, lr=1e-3)
    average = start
    for round_ in range(rounds):
        reached = []
        load(norms, average)
        for template in FEW:
            if mode == "parallel":
                load(norms, average)
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


def test_the_modes_differ_from_the_second_template_on(
    tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    def reached(mode: Any, count: int) -> Tensor:
        config = WATTConfig(mode=mode, rounds=1, templates=FEW[:count])
        return WATT(double_clip(), tiny_prompts, config).adapt(tiny_images[:4])

    assert torch.equal(reached("sequential", 1), reached("parallel", 1))
    assert not torch.allclose(reached("sequential", 2), reached("parallel", 2), atol=1e-5)


def test_the_first_step_follows_finite_differences(
    tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    model, images = double_clip(), tiny_images[:4]
    watt = WATT(model, tiny_prompts, WATTConfig(rounds=1, steps=1, templates=FEW[:1]))
    moved = watt.adapt(images) - watt.tower.start
    texts = watt.texts[0]
    own = texts[(unit_rows(model.encode_image(images)) @ texts.T).argmax(dim=-1)]

    def loss(norms: Tensor) -> float:
        v = unit_rows(watt.tower(norms, images))
        return float(literal_transductive_loss(v, own, watt.scale, 0.01))

    for coordinate in (0, 40, 200, 383):
        way = torch.zeros_like(moved)
        way[coordinate] = 1e-6
        slope = (loss(watt.tower.start + way) - loss(watt.tower.start - way)) / 2e-6
        assert float(moved[coordinate]) == pytest.approx(-1e-3 * slope / abs(slope), rel=ADAPTED)


def test_the_mean_of_its_own_templates_answers(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    watt = WATT(tiny_clip, tiny_prompts, WATTConfig(rounds=1))
    own = ClassPrompts(tiny_prompts.names, TEMPLATES)
    torch.testing.assert_close(watt.classifier, tiny_clip.classifier(own))
    answer = watt.predict(Batch(tiny_images)).logits
    plain = ZeroShot(tiny_clip, own, ZeroShotConfig()).predict(Batch(tiny_images)).logits
    assert not torch.allclose(answer, plain, atol=1e-2)  # switched off it would be this


def test_every_batch_starts_anew(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor
) -> None:
    watt = WATT(tiny_clip, tiny_prompts, WATTConfig(rounds=1, templates=FEW))
    first = watt.predict(Batch(tiny_images[:5])).logits
    watt.predict(Batch(tiny_images[5:]))
    assert torch.equal(watt.predict(Batch(tiny_images[:5])).logits, first)
    assert watt.state_dict() == {}


def test_the_authors_settings() -> None:
    entry = get_method("watt")
    assert (entry.config().mode, entry.config().rounds, entry.config().steps) == (
        "sequential",
        5,
        2,
    )
    assert (entry.presets["parallel"].mode, entry.presets["parallel"].rounds) == ("parallel", 50)
    assert len(TEMPLATES) == 8


def test_fixed_text_is_refused(tiny_clip: CLIP, tiny_prompts: ClassPrompts) -> None:
    fixed = ClassPrompts(tiny_prompts.names, features=tiny_clip.classifier(tiny_prompts))
    with pytest.raises(ValueError, match="names only"):
        WATT(tiny_clip, fixed, WATTConfig())
