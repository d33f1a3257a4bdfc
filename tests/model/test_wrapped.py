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

pytest.importorskip(
    "transformers", minversion="5"
)  # older tokenizers have a fixed side to pad

PROMPTS = ClassPrompts(("cat", "frog", "truck"), ("a photo of a {}",))


def test_a_wrapped_model_has_what_it_has(pixels: Tensor, words: Any) -> None:
    theirs = Convolutions().eval()
    ours = from_model(theirs, preprocess=Preprocess(32), tokenizer=words, id="conv")
    assert ours.is_wrapped and ours.capabilities == {"text", "norm"}
    assert (ours.embed_dim, ours.id, ours.bias) == (12, "conv", 0)
    assert ours.scale == pytest.approx(10)
    logits = create_method("zero_shot", ours, PROMPTS).predict(Batch(pixels)).logits
    ids = ours.tokenizer(PROMPTS.texts(PROMPTS.templates[0]))
    images, texts = map(
        F.normalize, (theirs.encode_image(pixels), theirs.encode_text(ids))
    )
    torch.testing.assert_close(
        logits, (10 * images @ texts.T).detach(), atol=LOGIT, rtol=FEATURE
    )
    for method in ("tda", "mta", "transclip"):
        adapter = create_method(method, ours, PROMPTS)
        images = [np.zeros((32, 32, 3), np.uint8) + 40 * i for i in range(4)]  # type: ignore[assignment]
        assert adapter.predict(images).logits.isfinite().all()
    with pytest.raises(MissingCapabilityError):
        create_method("domain_norm", ours, PROMPTS)
    with pytest.raises(MissingCapabilityError):
        create_method("tpt", ours, PROMPTS)
    with pytest.raises(UserError, match="wrapped"):
        save_model(ours, "nowhere.safetensors")


def test_tent_learns_the_layernorms_of_a_wrapped_image_tower(
    pixels: Tensor, words: Any
) -> None:
    theirs = Convolutions().eval()
    before = copy.deepcopy(theirs.state_dict())
    ours = from_model(theirs, preprocess=Preprocess(32), tokenizer=words)
    adapter: Any = create_method("tent", ours, PROMPTS)
    assert adapter.tower.start.numel() == 2 * 16
    first, second = (adapter.predict(Batch(pixels)).logits for _ in range(2))
    # One step of Adam by hand on a copy of the module gives what the second batch sees.
    copied = Convolutions()
    copied.load_state_dict(before)
    values: list[Any] = [copied.norm.weight, copied.norm.bias]
    texts = F.normalize(ours.encode_text(PROMPTS.texts(PROMPTS.templates[0])))

    def logits() -> Any:
        return 10 * F.normalize(copied.encode_image(pixels)) @ texts.detach().T

    torch.testing.assert_close(first, logits().detach(), atol=FEATURE, rtol=FEATURE)
    p = logits().softmax(dim=1)
    loss = -(p * p.log()).sum(dim=1).mean()
    gradients = torch.autograd.grad(loss, values)
    with torch.no_grad():
        for value, gradient in zip(values, gradients, strict=True):
            value -= 1e-3 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(second, logits().detach(), atol=LOGIT, rtol=LOGIT)
    assert (first - second).abs().max() > 1e-5
    torch.testing.assert_close(theirs.state_dict(), before, rtol=0, atol=0)


def test_a_wrapped_model_without_norms_or_tokenizer(pixels: Tensor) -> None:
    theirs = Convolutions(norm=False)
    with pytest.warns(UserWarning, match="training"):
        ours = from_model(theirs, preprocess=Preprocess(32))
    assert not theirs.training and ours.capabilities == frozenset()
    with pytest.raises(MissingCapabilityError, match="tokenizer"):
        create_method("zero_shot", ours, PROMPTS)
    fixed = ClassPrompts(("x", "y"), features=torch.randn(2, 12))
    assert create_method("zero_shot", ours, fixed).predict(
        Batch(pixels)
    ).logits.shape == (3, 2)


def test_a_model_of_features_is_named_by_its_width_or_as_asked() -> None:
    assert FeaturesOnly(8).id == "features-8"
    assert FeaturesOnly(8, id="mine").id == "mine"
