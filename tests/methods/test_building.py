"""The small parts that methods share: Adam, views, templates, explanations, frozen adapters."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.data.views import attach_views
from cliquetta.errors import UserError
from cliquetta.methods.base import Adapter
from cliquetta.methods.building.adam import Adam, AdamState, adam_step
from cliquetta.methods.building.explanation import Explanation
from cliquetta.methods.building.frozen import freeze
from cliquetta.methods.building.views import confident_views, near_one, selected_count
from cliquetta.methods.registry import create_method
from cliquetta.model.attention import Kind
from cliquetta.model.clip import encode_views
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch, ViewSpec
from tests._helpers.tiny import TINY_NAMES
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS
from tests._helpers.tolerance import FEATURE, assert_near


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_adam_is_torchs(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator)
    parameter = start.clone().requires_grad_()
    torch_adam = torch.optim.AdamW(
        [parameter], lr=3e-3, betas=(0.8, 0.99), weight_decay=decay
    )
    learned = AdamState.begin(start)
    for _ in range(7):
        parameter.grad = torch.randn(50, generator=generator)
        torch_adam.step()
        learned = adam_step(
            learned, parameter.grad, Adam(3e-3, (0.8, 0.99), weight_decay=decay)
        )
        torch.testing.assert_close(learned.values, parameter.detach())
    assert int(learned.steps) == 7


def test_confident_views_are_rounded_down_never_none_and_of_equals_the_first() -> None:
    assert [selected_count(64, fraction) for fraction in (0.1, 0.3, 1.0)] == [6, 19, 64]
    assert [selected_count(9, 0.1), selected_count(1, 0.3)] == [1, 1]
    logits = torch.tensor([0.0, 3.0]).repeat(1, 40, 1)
    assert confident_views(logits, 0.1).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_views_are_encoded_in_bounded_parts(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = attach_views(
        Batch(TINY_IMAGES[:3], tuple("abc")), ViewSpec("resized-crop", 5), seed=0
    ).views
    assert views is not None
    expected = torch.stack([TINY.encode_image(v, normalize=True) for v in views])
    plain = TINY.encode_image
    seen = []

    def spy(pixels: Tensor, **options: Any) -> Tensor:
        seen.append(len(pixels))
        return plain(pixels, **options)

    monkeypatch.setattr(TINY, "encode_image", spy)
    features = encode_views(TINY, views, chunk=chunk)
    assert_near(features, expected, FEATURE)
    assert sum(seen) == 15
    assert max(seen) == min(chunk, 15)


def test_cotangents_are_scaled_by_powers_of_two() -> None:
    cotangent = torch.tensor([[3e-9, -1e-9], [700.0, 5.0], [0.0, 0.0]])
    scaled, factor = near_one(cotangent)
    largest = scaled.abs().amax(dim=1)
    assert ((largest[:2] >= 0.5) & (largest[:2] < 1)).all()
    assert torch.equal(scaled / factor, cotangent)
    assert torch.equal(factor.log2(), factor.log2().round())
    assert not scaled[2].any()


def test_texts_that_cannot_be_learned_are_refused() -> None:
    fixed = ClassPrompts(TINY_NAMES, features=torch.ones(5, 24))
    with pytest.raises(
        UserError, match=r"tpt learns text, but .* fixed text features; give names"
    ):
        create_method("tpt", TINY, fixed)


@pytest.mark.parametrize("template", ["{} texture.", "semi{}."])
def test_a_template_without_words_before_the_class_name_is_refused(
    template: str,
) -> None:
    sentence = (
        f"words before the class name, of which {template!r} has none that stand alone"
    )
    with pytest.raises(UserError, match=re.escape(sentence)):
        create_method("tpt", TINY, ClassPrompts(TINY_NAMES, (template,)))


def test_features_are_stored_in_half_precision_and_maps_in_full() -> None:
    features = torch.ones(2, 4)
    maps: dict[Kind, Tensor] = {"class": torch.ones(3, 5).half()}
    stored = Explanation(features, torch.tensor([0, 1]), features, maps=maps).tensors()
    assert {name: (value.shape, value.dtype) for name, value in stored.items()} == {
        "features": ((2, 4), torch.float16),
        "prompted": ((2, 4), torch.float16),
        "maps.class": ((3, 5), torch.float32),
    }


def test_every_method_explains_plain_clip(adapter: Adapter, batch: Batch) -> None:
    adapter.collect_evidence = True
    explanation = adapter.explain(batch[:4], adapter.predict(batch))
    features = adapter.model.encode_image(batch.images[:4], normalize=True)
    assert_near(explanation.features, features, FEATURE)
    zero_shot = (features @ adapter.zero_shot_classifier.T).argmax(dim=1)
    assert torch.equal(explanation.before, zero_shot)


def test_a_frozen_adapter_predicts_by_its_state_and_learns_no_more(
    tmp_path: Path,
) -> None:
    tent = create_method("tent", TINY, TINY_PROMPTS)
    fresh = create_method("tent", TINY, TINY_PROMPTS)
    tent.predict(TINY_IMAGES)
    tent.save(tmp_path / "state")
    frozen = freeze([fresh], tmp_path / "state")
    first = frozen.predict(TINY_IMAGES).logits
    again = frozen.predict(TINY_IMAGES).logits
    assert torch.equal(first, again)
    torch.testing.assert_close(
        first, tent.predict(TINY_IMAGES).logits
    )  # before its step
    for adapters, word in (([fresh], "state"), ([fresh, tent], "one")):
        with pytest.raises(UserError, match=word):
            freeze(adapters, None)
