"""Wrapped models: their own functions, honest capabilities."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta import create_method, from_model
from cliquetta.errors import UserError
from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.clip import MissingCapabilityError
from cliquetta.model.preprocess import Preprocess
from cliquetta.model.wrapped import FeaturesOnly
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch
from tests._helpers.convolutions import Convolutions
from tests._helpers.tolerance import FEATURE, LOGIT

# older tokenizers have a fixed side to pad
pytest.importorskip("transformers", minversion="5")

PROMPTS = ClassPrompts(("cat", "frog", "truck"), ("a photo of a {}",))


def test_a_wrapped_model_has_what_it_has(words: Any) -> None:
    ours = from_model(
        Convolutions().eval(),
        preprocess=Preprocess(32),
        tokenizer=words,
        id="conv",
    )
    assert ours.is_wrapped
    assert ours.capabilities == {"text", "norm"}
    assert ours.embed_dim == 12
    assert ours.id == "conv"
    assert ours.bias == 0
    assert ours.scale == pytest.approx(10)


@pytest.fixture
def wrapped(words: Any) -> Any:
    """A model that we wrap, and it in its wrapper."""
    theirs = Convolutions().eval()
    return theirs, from_model(theirs, preprocess=Preprocess(32), tokenizer=words)


def test_logits_of_a_wrapped_model_are_its_own(wrapped: Any, pixels: Tensor) -> None:
    theirs, ours = wrapped
    adapter = create_method("zero_shot", ours, PROMPTS)
    ids = ours.tokenizer(PROMPTS.texts(PROMPTS.templates[0]))
    images = F.normalize(theirs.encode_image(pixels))
    texts = F.normalize(theirs.encode_text(ids))
    expected = (10 * images @ texts.T).detach()
    logits = adapter.predict(Batch(pixels)).logits
    torch.testing.assert_close(logits, expected, atol=LOGIT, rtol=FEATURE)


@pytest.mark.parametrize("method", ["tda", "mta", "transclip"])
def test_methods_predict_by_a_wrapped_model(wrapped: Any, method: str) -> None:
    _, ours = wrapped
    adapter: Any = create_method(method, ours, PROMPTS)
    # four pictures of one colour each
    shades = [np.full((32, 32, 3), 40 * i, np.uint8) for i in range(4)]
    logits = adapter.predict(shades).logits
    assert logits.isfinite().all()


def test_what_a_wrapped_model_cannot_do_is_refused(wrapped: Any) -> None:
    _, ours = wrapped
    for method in ("domain_norm", "tpt"):
        with pytest.raises(MissingCapabilityError):
            create_method(method, ours, PROMPTS)
    with pytest.raises(UserError, match="wrapped"):
        save_model(ours, "nowhere.safetensors")


def test_tent_learns_the_layernorms_of_a_wrapped_image_tower(
    wrapped: Any, pixels: Tensor
) -> None:
    theirs, ours = wrapped
    before = copy.deepcopy(theirs.state_dict())
    adapter: Any = create_method("tent", ours, PROMPTS)
    assert adapter.tower.start.numel() == 2 * 16
    first = adapter.predict(Batch(pixels)).logits
    second = adapter.predict(Batch(pixels)).logits
    assert (first - second).abs().max() > 1e-5
    torch.testing.assert_close(theirs.state_dict(), before, rtol=0, atol=0)

    # One step of Adam by hand on a copy of the module gives what the second batch sees.
    copied = Convolutions()
    copied.load_state_dict(before)
    texts = ours.encode_text(PROMPTS.texts(PROMPTS.templates[0])).detach()
    directions = F.normalize(texts)

    def logits() -> Any:
        return 10 * F.normalize(copied.encode_image(pixels)) @ directions.T

    torch.testing.assert_close(first, logits().detach(), atol=FEATURE, rtol=FEATURE)
    p = logits().softmax(dim=1)
    entropy = -(p * p.log()).sum(dim=1).mean()
    values: list[Any] = [copied.norm.weight, copied.norm.bias]
    gradients = torch.autograd.grad(entropy, values)
    with torch.no_grad():
        for value, gradient in zip(values, gradients, strict=True):
            value -= 1e-3 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(second, logits().detach(), atol=LOGIT, rtol=LOGIT)


def test_a_wrapped_model_without_norms_or_tokenizer(pixels: Tensor) -> None:
    theirs = Convolutions(norm=False)
    with pytest.warns(UserWarning, match="training"):
        ours = from_model(theirs, preprocess=Preprocess(32))
    assert not theirs.training
    assert ours.capabilities == frozenset()
    with pytest.raises(MissingCapabilityError, match="tokenizer"):
        create_method("zero_shot", ours, PROMPTS)
    fixed = ClassPrompts(("x", "y"), features=torch.randn(2, 12))
    adapter = create_method("zero_shot", ours, fixed)
    assert adapter.predict(Batch(pixels)).logits.shape == (3, 2)


def test_a_model_of_features_is_named_by_its_width_or_as_asked() -> None:
    assert FeaturesOnly(8).id == "features-8"
    assert FeaturesOnly(8, id="mine").id == "mine"
