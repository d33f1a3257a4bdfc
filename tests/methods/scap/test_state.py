"""Streams that are split, saved and continued elsewhere end as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cliquetta.methods.building.state import load_state
from cliquetta.methods.scap import SCAP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.building import assert_same_state
from tests._helpers.oracle import scap_config
from tests._helpers.scenes import NAMES, build_model, make_batches

MODEL = build_model(0).float()
BATCHES = [images.float() for images in make_batches(3, 6, 6)]
PROMPTS = ClassPrompts(NAMES, ("a photo of a {}.", "art of the {}."))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"text_per_class": True, "blocks": (1, 2)},
        {"modalities": "text"},
        {"steps": 2},
    ],
    ids=str,
)
def test_a_split_stream_equals_an_unbroken_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    config = scap_config(threshold=0.4, capacity=2, **options)
    unbroken = SCAP(MODEL, PROMPTS, config)
    expected = []
    for number, images in enumerate(BATCHES):
        unbroken.save(tmp_path / f"{number}.safetensors")
        expected.append(unbroken.predict(images).logits)

    # the text gradient changed over
    assert int(unbroken.memory["sets_learned"]) > MODEL.embed_dim

    for number in range(len(BATCHES)):
        # another seed: whatever it decides must come from the state
        other = SCAP(MODEL, PROMPTS, config, seed=9)
        load_state(other, tmp_path / f"{number}.safetensors")
        for images, logits in zip(BATCHES[number:], expected[number:], strict=True):
            assert torch.equal(other.predict(images).logits, logits)
        assert_same_state(other, unbroken.state_dict())
