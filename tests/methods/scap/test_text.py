"""Text gradients at the start context against autograd, by products and by the Jacobian."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cliquetta.methods.scap import SCAP
from cliquetta.methods.scap import text as text_module
from cliquetta.methods.scap.text import PromptedText
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.oracle import scap_config
from tests._helpers.scenes import NAMES, build_model, make_batches
from tests._helpers.tiny_world import draw
from tests._helpers.tolerance import DOUBLE, FEATURE, assert_near
from tests.reference.scap_equations import fixed_features, text_features

MODEL = build_model(0)
CLASSES = (*NAMES, "bird", "grey horse", "deer", "air plane")
"""Enough for the tower to run what all texts begin with once."""
TEMPLATES = {
    "one template": ("a photo of a {}.",),
    "three templates": ("a photo of a {}.", "art of the {}.", "{}"),
}


@pytest.fixture(params=sorted(TEMPLATES))
def text(request: pytest.FixtureRequest) -> PromptedText:
    prompts = ClassPrompts(CLASSES, TEMPLATES[request.param])
    return PromptedText(MODEL, prompts, 0.4)


def literal_features(text: PromptedText, context: Tensor) -> Tensor:
    """Features under one context, or one per class, by the oracle."""
    templates = TEMPLATES["one template" if text.fixed is None else "three templates"]
    prompts = ClassPrompts(CLASSES, templates)
    fixed = fixed_features(MODEL, prompts)
    return text_features(MODEL, prompts, context, fixed, 0.4)


@pytest.mark.parametrize("jacobian", [False, True])
@pytest.mark.parametrize("rows", [16384, 1])
def test_gradients_of_each_class_equal_autograd(
    text: PromptedText, jacobian: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "ROWS", rows)
    if jacobian:
        text.build_jacobian()
    cotangents = draw(3, len(CLASSES), MODEL.embed_dim)
    gradients = text.vjp(cotangents)

    context_of_each = text.start.expand(len(CLASSES), -1, -1)
    leaf = context_of_each.clone().requires_grad_()
    features = literal_features(text, leaf)

    for cotangent, actual in zip(cotangents, gradients, strict=True):
        (expected,) = torch.autograd.grad(features, leaf, cotangent, retain_graph=True)
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(actual, expected, rtol=DOUBLE, atol=DOUBLE)


@pytest.mark.parametrize("jacobian", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_gradients_of_a_shared_context_equal_autograd(
    text: PromptedText, jacobian: bool, size: float
) -> None:
    if jacobian:
        text.build_jacobian()
    slopes = size * draw(4, len(CLASSES))
    images = draw(4, MODEL.embed_dim, seed=1)
    gradients = text.vjp_shared(slopes, images)

    leaf = text.start.clone().requires_grad_()
    features = literal_features(text, leaf)

    for slope, image, actual in zip(slopes, images, gradients, strict=True):
        cosines = features @ image
        loss = (slope * cosines).sum()
        (expected,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        torch.testing.assert_close(actual, expected, rtol=DOUBLE, atol=DOUBLE * size)


class Seen(NamedTuple):
    """A batch: kind of its text gradient, its logits, and the sets learned so far."""

    kind: str
    logits: Tensor
    tally: int


# --- the change-over ----------------------------------------------------------------------------


def stream_of(adapter: SCAP) -> list[Seen]:
    """What is seen of every batch of a stream."""
    batches = []
    for images in make_batches(3, 8, 6):
        prediction = adapter.predict(images)
        tally = int(adapter.memory["sets_learned"])
        kind = prediction.evidence["text_gradient"]
        batches.append(Seen(kind, prediction.logits, tally))
    return batches


def adapter_of(**options: Any) -> SCAP:
    return SCAP(MODEL, ClassPrompts(CLASSES), scap_config(threshold=0.3, **options))


@pytest.mark.parametrize("text_per_class", [False, True])
def test_the_change_over_comes_when_it_pays_and_changes_nothing(
    text_per_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(adapter_of(text_per_class=text_per_class))
    for seen in stream:
        pays = seen.tally > MODEL.embed_dim
        assert seen.kind == ("jacobian" if pays else "vjp")

    # both kinds are seen
    assert {seen.kind for seen in stream} == {"vjp", "jacobian"}

    monkeypatch.setattr(PromptedText, "build_jacobian", lambda self: None)
    never = stream_of(adapter_of(text_per_class=text_per_class))

    assert {seen.kind for seen in never} == {"vjp"}
    for seen, expected in zip(stream, never, strict=True):
        assert_near(seen.logits, expected.logits, FEATURE)


def test_a_reset_stream_changes_over_again_without_building_again() -> None:
    adapter = adapter_of()
    before = stream_of(adapter)
    built = adapter.text.jacobian
    adapter.reset()
    again = stream_of(adapter)
    for seen, expected in zip(again, before, strict=True):
        assert seen.kind == expected.kind
        assert torch.equal(seen.logits, expected.logits)

    assert adapter.text.jacobian is built
