"""Frozen adapters: what may be frozen, and that nothing is learned any more."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.methods.building.frozen import freeze
from cliquetta.methods.registry import create_method
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.types import Batch


def test_it_predicts_by_its_state_and_learns_no_more(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts, tiny_images: Tensor, tmp_path: Path
) -> None:
    tent, fresh = (create_method("tent", tiny_clip, tiny_prompts) for _ in range(2))
    tent.predict(Batch(tiny_images))
    tent.save(tmp_path / "state")
    frozen = freeze([fresh], tmp_path / "state")
    first, again = (frozen.predict(Batch(tiny_images)).logits for _ in range(2))
    assert torch.equal(first, again)
    torch.testing.assert_close(first, tent.predict(Batch(tiny_images)).logits)  # before its step


@pytest.mark.parametrize(("names", "message"), [("tent", "state"), ("tent tent", "one method")])
def test_what_cannot_be_frozen(
    names: str, message: str, tiny_clip: CLIP, tiny_prompts: ClassPrompts
) -> None:
    adapters = [create_method(name, tiny_clip, tiny_prompts) for name in names.split()]
    with pytest.raises(UserError, match=message):
        freeze(adapters, None)
