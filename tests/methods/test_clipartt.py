"""CLIPArTT against a training loop on the model's own LayerNorms, with its loss entry by entry."""

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.clipartt import CLIPArTT, CLIPArTTConfig, transductive_loss
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.live import (
    Live,
    descend,
    double_clip,
    literal_transductive_loss,
    unit_rows,
)
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS, draw


def live_loss(live: Live, images: Tensor) -> Tensor:
    """The loss of a batch under the model's current norms."""
    v = live.features(images)
    cosines = v.detach() @ live.text.T

    # a text of the three likeliest classes of each image
    texts = []
    for row in cosines:
        best = row.topk(3).indices.tolist()
        names = [TINY_PROMPTS.names[c] for c in best]
        joined = " or ".join(names)
        texts.append(f"a photo of a {joined}")

    t = unit_rows(live.model.encode_text(texts))
    return literal_transductive_loss(v, t, live.scale, 0.01)


@pytest.mark.parametrize("detach", [False, True])
def test_the_loss_equals_its_entries(detach: bool) -> None:
    v = unit_rows(draw(5, 6)).requires_grad_()
    t = unit_rows(draw(5, 6, seed=1))
    ours = transductive_loss(v, t, 7.0, 0.3, detach=detach)
    literal = literal_transductive_loss(v, t, 7.0, 0.3, detach=detach)

    torch.testing.assert_close(ours, literal)
    (gradient,) = torch.autograd.grad(ours, v)
    (expected,) = torch.autograd.grad(literal, v)

    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_batch_equals_a_training_loop(steps: int) -> None:
    images = TINY_IMAGES[:6]
    clipartt = CLIPArTT(double_clip(), TINY_PROMPTS, CLIPArTTConfig(steps=steps))
    live = Live()
    optimiser = torch.optim.Adam(live.norms, lr=1e-3, betas=(0.9, 0.999))
    for _ in range(steps):
        descend(optimiser, live_loss(live, images))

    torch.testing.assert_close(clipartt.predict(images).logits, live.predict(images))


def test_texts_name_the_likeliest_classes_in_order() -> None:
    prompts = ClassPrompts(("airplane", "house_cat", "frog", "ship"))
    clipartt = CLIPArTT(TINY, prompts, CLIPArTTConfig())
    text = clipartt.mixed_text([1, 3, 0])

    assert text == "a photo of a house cat or ship or airplane"


def test_an_image_is_compared_with_the_text_of_its_likeliest_classes() -> None:
    prompts = ClassPrompts(("airplane", "house_cat", "frog", "ship"))
    clipartt = CLIPArTT(TINY, prompts, CLIPArTTConfig())
    texts = clipartt.classifier
    # a house cat with a little of a ship
    image = unit_rows(texts[1:2] + 0.1 * texts[3:])
    likeliest = (image @ texts.T).topk(3).indices[0].tolist()

    assert likeliest[0] == 1

    mixed = clipartt.mixed_text(likeliest)
    expected = TINY.encode_text([mixed], normalize=True)

    torch.testing.assert_close(clipartt.pseudo_texts(image), expected)


def test_two_classes_are_enough() -> None:
    clipartt = CLIPArTT(TINY, ClassPrompts(("cat", "ship")), CLIPArTTConfig(steps=1))
    assert clipartt.predict(TINY_IMAGES).logits.shape == (10, 2)


def test_names_too_long_to_be_joined_are_refused() -> None:
    long = tuple(f"{name} of an unusually long and winding kind" for name in TINY_NAMES)
    with pytest.raises(UserError, match="class name"):
        CLIPArTT(TINY, ClassPrompts(long), CLIPArTTConfig())
    # one of them fits
    CLIPArTT(TINY, ClassPrompts(long), CLIPArTTConfig(topk=1))
