"""CLIPArTT against a training loop on the model's own LayerNorms, with its loss entry by entry."""

import pytest
import torch
from torch import Tensor

from cliquetta.methods.clipartt import CLIPArTT, CLIPArTTConfig, transductive_loss
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.live_layernorms import (
    double_clip,
    literal_transductive_loss,
    open_norms,
    unit_rows,
)
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS


def random_units(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return unit_rows(torch.randn(rows, 6, generator=generator, dtype=torch.float64))


def live_step(model: CLIP, prompts: ClassPrompts, images: Tensor) -> Tensor:
    """The loss of a batch under the model's current norms."""
    v = unit_rows(model.encode_image(images))
    scores = v.detach() @ model.classifier(prompts).T
    texts = []
    for row in scores:
        c1, c2, c3 = sorted(range(len(prompts)), key=lambda c: -float(row[c]))[:3]
        names = prompts.names
        texts.append(f"a photo of a {names[c1]} or {names[c2]} or {names[c3]}")
    t = unit_rows(model.encode_text(texts))
    return literal_transductive_loss(v, t, model.scale, 0.01)


@pytest.mark.parametrize("detach", [False, True])
def test_the_loss_equals_its_entries(detach: bool) -> None:
    v, t = random_units(5, 0).requires_grad_(), random_units(5, 1)
    ours = transductive_loss(v, t, 7.0, 0.3, detach=detach)
    literal = literal_transductive_loss(v, t, 7.0, 0.3, detach=detach)
    torch.testing.assert_close(ours, literal)
    (ours_g,) = torch.autograd.grad(ours, v)
    (literal_g,) = torch.autograd.grad(literal, v)
    torch.testing.assert_close(ours_g, literal_g)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_batch_equals_a_training_loop(steps: int) -> None:
    images = TINY_IMAGES[:6]
    clipartt = CLIPArTT(double_clip(), TINY_PROMPTS, CLIPArTTConfig(steps=steps))
    prediction = clipartt.predict(images).logits
    live = double_clip()
    norms = open_norms(live.visual)
    optimiser = torch.optim.Adam(norms, lr=1e-3, betas=(0.9, 0.999))
    for _ in range(steps):
        optimiser.zero_grad()
        live_step(live, TINY_PROMPTS, images).backward()
        optimiser.step()
    v = unit_rows(live.encode_image(images))
    expected = live.scale * v @ live.classifier(TINY_PROMPTS).T
    torch.testing.assert_close(prediction, expected.detach().float())


def test_texts_name_the_likeliest_classes_in_order() -> None:
    prompts = ClassPrompts(("airplane", "house_cat", "frog", "ship"))
    clipartt = CLIPArTT(TINY, prompts, CLIPArTTConfig())
    assert clipartt.mixed_text([1, 3, 0]) == "a photo of a house cat or ship or airplane"
    features = unit_rows(clipartt.classifier[1:2] + 0.1 * clipartt.classifier[3:])
    top = (features @ clipartt.classifier.T).topk(3).indices[0].tolist()
    assert top[0] == 1
    expected = TINY.encode_text([clipartt.mixed_text(top)], normalize=True)
    torch.testing.assert_close(clipartt.pseudo_texts(features), expected)


def test_names_that_cannot_be_joined_are_refused_at_the_door() -> None:
    long = tuple(f"{name} of an unusually long and winding kind" for name in TINY_NAMES)
    with pytest.raises(ValueError, match="shorten the class name"):
        CLIPArTT(TINY, ClassPrompts(long), CLIPArTTConfig())
    CLIPArTT(TINY, ClassPrompts(long), CLIPArTTConfig(topk=1))


def test_two_classes_are_enough() -> None:
    clipartt = CLIPArTT(TINY, ClassPrompts(("cat", "ship")), CLIPArTTConfig(steps=1))
    assert clipartt.predict(TINY_IMAGES).logits.shape == (10, 2)
