"""LayerNorm parameters from outside against the same values loaded into the tower."""

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
    shared = {p.data_ptr() for p in TINY.visual.parameters()}
    assert {p.data_ptr() for p in tower._tower.parameters()} == shared
    assert all(isinstance(m.ln_1, torch.nn.LayerNorm) for m in TINY.visual.blocks)


@pytest.mark.parametrize("which", ["visual", "text"])
def test_other_parameters_act_as_if_loaded(which: str) -> None:
    model = double_clip()
    tower = LayerNormTower(getattr(model, which))
    inputs = (
        TINY_IMAGES if which == "visual" else model.tokenizer(["a cat", "a red truck"])
    )
    changed = (tower.start + 0.1 * draw(len(tower.start))).requires_grad_()
    features = tower(changed, inputs)
    (gradient,) = torch.autograd.grad(features.sin().sum(), changed)

    norms = open_norms(getattr(model, which))
    load_norms(norms, changed)
    live = (
        model.encode_image(inputs) if which == "visual" else model.encode_text(inputs)
    )
    torch.testing.assert_close(features, live)
    torch.testing.assert_close(
        gradient, flat(list(torch.autograd.grad(live.sin().sum(), norms)))
    )


def test_small_steps_are_felt_in_half_precision() -> None:
    model = build_tiny_clip().to(torch.bfloat16)
    tower = LayerNormTower(model.visual)
    gains = torch.zeros_like(tower.start).view(-1, 2, 32)
    gains[:, 0] = 1
    moved = tower.start + 1e-3 * gains.flatten()
    lost = moved.to(torch.bfloat16) == tower.start.to(torch.bfloat16)
    moved = torch.where(
        lost, moved, tower.start
    )  # only steps that bfloat16 cannot show
    assert (moved != tower.start).sum() > 100
    values = tower.start.clone().requires_grad_()
    features = tower(values, TINY_IMAGES)
    (gradient,) = torch.autograd.grad(features.square().sum(), values)
    assert {x.dtype for x in (tower.start, features, gradient)} == {torch.float32}
    assert not torch.equal(tower(moved, TINY_IMAGES), features)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_computes_in_the_precision_of_its_gain(half: torch.dtype) -> None:
    plain = torch.nn.LayerNorm(8).double()
    plain.weight.data, plain.bias.data = draw(2, 8).unbind()
    x = draw(4, 8, seed=1).to(half)
    prediction = Float32LayerNorm(plain)(x)
    assert prediction.dtype == half
    assert torch.equal(prediction, plain(x.double()).to(half))
