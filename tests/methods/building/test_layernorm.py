"""LayerNorm parameters from outside against the same values loaded into the tower."""

from typing import Any

import pytest
import torch

from cliquetta.methods.building.layernorm import Float32LayerNorm, LayerNormTower
from tests._helpers.live import double_clip, flat, load_norms, open_norms
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY, TINY_IMAGES, draw


def test_the_start_is_the_model_itself() -> None:
    tower = LayerNormTower(TINY.visual)
    assert torch.equal(tower(tower.start, TINY_IMAGES), TINY.encode_image(TINY_IMAGES))

    texts = LayerNormTower(TINY.text)  # type: ignore[arg-type]
    ids = TINY.tokenizer(["a cat", "a photo of a long ship"])

    assert torch.equal(texts(texts.start, ids), TINY.encode_text(ids))
    # ln_pre, ln_post and two per block; two per block and ln_final
    assert len(tower.start) == 6 * 2 * 32
    assert len(texts.start) == 5 * 2 * 32


def test_weights_are_shared_not_copied() -> None:
    tower = LayerNormTower(TINY.visual)
    of_the_model = {p.data_ptr() for p in TINY.visual.parameters()}
    of_the_tower = {p.data_ptr() for p in tower._tower.parameters()}

    assert of_the_tower == of_the_model
    # and the model keeps its own modules
    for block in TINY.visual.blocks:
        assert isinstance(block.ln_1, torch.nn.LayerNorm)


@pytest.mark.parametrize("which", ["visual", "text"])
def test_other_parameters_act_as_if_loaded(which: str) -> None:
    model = double_clip()
    inputs = TINY_IMAGES
    encode: Any = model.encode_image
    if which == "text":
        inputs = model.tokenizer(["a cat", "a red truck"])
        encode = model.encode_text

    tower = LayerNormTower(getattr(model, which))
    changed = (tower.start + 0.1 * draw(len(tower.start))).requires_grad_()
    features = tower(changed, inputs)
    (gradient,) = torch.autograd.grad(features.sin().sum(), changed)

    norms = open_norms(getattr(model, which))
    load_norms(norms, changed)
    live = encode(inputs)
    live_gradients = torch.autograd.grad(live.sin().sum(), norms)

    torch.testing.assert_close(features, live)
    torch.testing.assert_close(gradient, flat(list(live_gradients)))


def test_small_steps_are_felt_in_half_precision() -> None:
    model = build_tiny_clip().to(torch.bfloat16)
    tower = LayerNormTower(model.visual)
    gains = torch.zeros_like(tower.start).view(-1, 2, 32)
    gains[:, 0] = 1

    # only steps that bfloat16 cannot show
    step = tower.start + 1e-3 * gains.flatten()
    lost = step.to(torch.bfloat16) == tower.start.to(torch.bfloat16)
    moved = torch.where(lost, step, tower.start)

    assert (moved != tower.start).sum() > 100

    values = tower.start.clone().requires_grad_()
    features = tower(values, TINY_IMAGES)
    (gradient,) = torch.autograd.grad(features.square().sum(), values)

    assert tower.start.dtype == torch.float32
    assert features.dtype == torch.float32
    assert gradient.dtype == torch.float32
    assert not torch.equal(tower(moved, TINY_IMAGES), features)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_computes_in_the_precision_of_its_gain(half: torch.dtype) -> None:
    plain = torch.nn.LayerNorm(8).double()
    gain, bias = draw(2, 8)
    plain.weight.data = gain
    plain.bias.data = bias
    x = draw(4, 8, seed=1).to(half)
    actual = Float32LayerNorm(plain)(x)
    expected = plain(x.double()).to(half)

    assert actual.dtype == half
    assert torch.equal(actual, expected)
