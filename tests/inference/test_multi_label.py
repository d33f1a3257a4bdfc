"""Independent scores of several labels, against the sigmoids of transformers' SigLIP."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cliquetta.errors import UserError
from cliquetta.inference.bulk import predict
from cliquetta.methods.building.frozen import FrozenAdapter
from cliquetta.methods.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.model.in_memory import from_model
from cliquetta.model.preprocess import Preprocess
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.siglip import tiny_siglip
from tests._helpers.tolerance import SUM

pytest.importorskip("transformers", minversion="5")  # SigLIP with a projection

NAMES = ("cat", "frog", "ship")


@pytest.fixture(scope="module")
def siglip() -> tuple[CLIP, Any]:
    original = tiny_siglip()
    return from_model(original, preprocess=Preprocess.openai(32)), original


@pytest.fixture
def images() -> list[NDArray[np.uint8]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(4)]


def test_probabilities_are_the_sigmoids_of_the_original(
    siglip: tuple[CLIP, Any], images: list[NDArray[np.uint8]]
) -> None:
    model, original = siglip
    ids = torch.tensor([[5, 6, 7, 1], [8, 9, 10, 1], [11, 12, 4, 1]])
    pixels = model.preprocess.pixels(np.stack(images))
    with torch.no_grad():
        answer = original(input_ids=ids, pixel_values=pixels)
        text = answer.text_embeds
    expected = answer.logits_per_image.sigmoid()
    adapter = create_method("zero_shot", model, ClassPrompts(NAMES, features=text))
    middle = expected.flatten().sort().values
    least = float(middle[3:5].mean())  # between two probabilities: rounding decides nothing
    for method in (adapter, FrozenAdapter(adapter)):
        rows = predict(images, method=method, all_probabilities=True, multi_label=least).rows
        for row, probabilities in zip(rows, expected, strict=True):
            found = [row[f"p_{name}"] for name in NAMES]
            np.testing.assert_allclose(found, probabilities, atol=SUM)
            reached = [n for n, p in zip(NAMES, found, strict=True) if p >= least - 1e-6]
            assert row["labels"].split(";") == sorted(
                reached, key=lambda name: -row[f"p_{name}"]
            ) or (row["labels"] == "" and not reached)
            assert row["probability"] == max(found)


@pytest.mark.parametrize("changes", ({"reject": 0.5}, {"calibrate": True}))
def test_several_labels_have_no_rejection_and_no_temperature(
    siglip: tuple[CLIP, Any], images: list[NDArray[np.uint8]], changes: dict[str, Any]
) -> None:
    adapter = create_method("zero_shot", siglip[0], ClassPrompts(NAMES, features=torch.eye(3, 64)))
    with pytest.raises(UserError, match="leave out --multi-label or those"):
        predict(images, method=adapter, multi_label=0.5, **changes)


@pytest.mark.parametrize("method", ["domain_norm", "tda"])
def test_methods_that_weigh_classes_refuse(
    method: str, siglip: tuple[CLIP, Any], images: list[NDArray[np.uint8]]
) -> None:
    adapter = create_method(method, siglip[0], ClassPrompts(NAMES, features=torch.eye(3, 64)))
    with pytest.raises(UserError, match="weighs classes against each other"):
        predict(images, method=adapter, multi_label=0.5)


def test_softmax_models_refuse(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, images: list[NDArray[np.uint8]]
) -> None:
    adapter = create_method("zero_shot", tiny_clip, tiny_prompts)
    with pytest.raises(UserError, match="need a sigmoid model"):
        predict(images, method=adapter, multi_label=0.5)
