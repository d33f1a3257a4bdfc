"""The small parts that methods share: Adam, views, templates, explanations, frozen adapters."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.adam import Adam, AdamState, adam_step
from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.explanation import Explanation
from cliquetta.methods.building.frozen import freeze
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.building.views import confident_views, near_one, selected_count
from cliquetta.model.attention import Kind
from cliquetta.model.clip import encode_views
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, ViewSpec
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS, with_views
from tests._helpers.tolerance import FEATURE, assert_near


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_adam_is_torchs(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator)
    parameter = start.clone().requires_grad_()
    torch_adam = torch.optim.AdamW(
        [parameter],
        lr=3e-3,
        betas=(0.8, 0.99),
        weight_decay=decay,
    )
    ours = Adam(3e-3, (0.8, 0.99), weight_decay=decay)
    learned = AdamState.begin(start)

    for _ in range(7):
        gradient = torch.randn(50, generator=generator)
        parameter.grad = gradient
        torch_adam.step()
        learned = adam_step(learned, gradient, ours)
        torch.testing.assert_close(learned.values, parameter.detach())

    assert int(learned.steps) == 7


@pytest.mark.parametrize(
    ("views", "fraction", "expected"),
    [(64, 0.1, 6), (64, 0.3, 19), (64, 1.0, 64), (9, 0.1, 1), (1, 0.3, 1)],
)
def test_confident_views_are_rounded_down_but_never_none(
    views: int, fraction: float, expected: int
) -> None:
    assert selected_count(views, fraction) == expected


def test_of_equally_confident_views_the_first_are_taken() -> None:
    logits = torch.tensor([0.0, 3.0]).repeat(1, 40, 1)
    assert confident_views(logits, 0.1).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_views_are_encoded_in_bounded_parts(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = with_views(3, ViewSpec("resized-crop", 5))
    expected = [TINY.encode_image(views, normalize=True) for views in batch.views]
    plain = TINY.encode_image
    sizes = []

    def spy(pixels: Tensor, **options: Any) -> Tensor:
        sizes.append(len(pixels))
        return plain(pixels, **options)

    monkeypatch.setattr(TINY, "encode_image", spy)
    features = encode_views(TINY, batch.views, chunk=chunk)

    assert_near(features, torch.stack(expected), FEATURE)
    assert sum(sizes) == 3 * 5
    assert max(sizes) == min(chunk, 3 * 5)


def test_cotangents_are_scaled_by_powers_of_two() -> None:
    cotangent = torch.tensor([[3e-9, -1e-9], [700.0, 5.0], [0.0, 0.0]])
    scaled, factor = near_one(cotangent)
    tiny, large, zero = scaled.abs().amax(dim=1).tolist()

    assert 0.5 <= tiny < 1
    assert 0.5 <= large < 1
    assert zero == 0
    # a power of two divides without rounding
    assert torch.equal(scaled / factor, cotangent)

    exponent = factor.log2()
    assert torch.equal(exponent, exponent.round())


def test_texts_that_cannot_be_learned_are_refused() -> None:
    fixed = ClassPrompts(TINY_NAMES, features=torch.ones(5, 24))
    says = r"tpt learns text, but .* fixed text features; give names"
    with pytest.raises(UserError, match=says):
        create_method("tpt", TINY, fixed)


@pytest.mark.parametrize("template", ["{} texture.", "semi{}."])
def test_a_template_without_words_before_the_class_name_is_refused(
    template: str,
) -> None:
    prompts = ClassPrompts(TINY_NAMES, (template,))
    says = (
        f"words before the class name, of which {template!r} has none that stand alone"
    )
    with pytest.raises(UserError, match=re.escape(says)):
        create_method("tpt", TINY, prompts)


def test_features_are_stored_in_half_precision_and_maps_in_full() -> None:
    features = torch.ones(2, 4)
    maps: dict[Kind, Tensor] = {"class": torch.ones(3, 5).half()}
    classes = torch.tensor([0, 1])
    stored = Explanation(features, classes, features, maps=maps).tensors()
    shapes = {name: tuple(value.shape) for name, value in stored.items()}

    assert shapes == {
        "features": (2, 4),
        "prompted": (2, 4),
        "maps.class": (3, 5),
    }

    types = {name: value.dtype for name, value in stored.items()}
    assert types == {
        "features": torch.float16,
        "prompted": torch.float16,
        "maps.class": torch.float32,
    }


def test_every_method_explains_plain_clip(adapter: Adapter, batch: Batch) -> None:
    adapter.collect_evidence = True
    prediction = adapter.predict(batch)
    explanation = adapter.explain(batch[:4], prediction)
    features = adapter.model.encode_image(batch.images[:4], normalize=True)

    assert_near(explanation.features, features, FEATURE)

    zero_shot = features @ adapter.zero_shot_classifier.T
    assert torch.equal(explanation.before, zero_shot.argmax(dim=1))


def test_a_frozen_adapter_predicts_by_its_state_and_learns_no_more(
    tmp_path: Path,
) -> None:
    tent = create_method("tent", TINY, TINY_PROMPTS)
    tent.predict(TINY_IMAGES)
    tent.save(tmp_path / "state")
    fresh = create_method("tent", TINY, TINY_PROMPTS)
    frozen = freeze([fresh], tmp_path / "state")

    first = frozen.predict(TINY_IMAGES).logits
    again = frozen.predict(TINY_IMAGES).logits

    assert torch.equal(first, again)

    # Tent predicts before its step
    expected = tent.predict(TINY_IMAGES).logits

    torch.testing.assert_close(first, expected)


def test_freezing_needs_a_state() -> None:
    with pytest.raises(UserError, match="state"):
        freeze([create_method("tent", TINY, TINY_PROMPTS)], None)


def test_only_one_adapter_is_frozen() -> None:
    first = create_method("tent", TINY, TINY_PROMPTS)
    second = create_method("tent", TINY, TINY_PROMPTS)
    with pytest.raises(UserError, match="one"):
        freeze([first, second], None)
