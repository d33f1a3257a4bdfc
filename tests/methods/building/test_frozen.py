"""Frozen adapters: what may be frozen, and that nothing is learned any more."""

from pathlib import Path

import pytest
import torch

from cliquetta.errors import UserError
from cliquetta.methods.building.frozen import freeze
from cliquetta.methods.registry import create_method
from tests._helpers.tiny_world import TINY, TINY_IMAGES, TINY_PROMPTS


def test_it_predicts_by_its_state_and_learns_no_more(tmp_path: Path) -> None:
    tent, fresh = (create_method("tent", TINY, TINY_PROMPTS) for _ in range(2))
    tent.predict(TINY_IMAGES)
    tent.save(tmp_path / "state")
    frozen = freeze([fresh], tmp_path / "state")
    first, again = (frozen.predict(TINY_IMAGES).logits for _ in range(2))
    assert torch.equal(first, again)
    torch.testing.assert_close(first, tent.predict(TINY_IMAGES).logits)  # before its step


@pytest.mark.parametrize(("names", "message"), [("tent", "state"), ("tent tent", "one method")])
def test_what_cannot_be_frozen(names: str, message: str) -> None:
    adapters = [create_method(name, TINY, TINY_PROMPTS) for name in names.split()]
    with pytest.raises(UserError, match=message):
        freeze(adapters, None)
