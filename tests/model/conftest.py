"""The shared model with either activation."""

from __future__ import annotations

import pytest

from cliquetta.model.checkpoints.state import Checkpoint, build, with_activation
from cliquetta.model.clip import CLIP


@pytest.fixture(scope="module", params=["quick_gelu", "gelu"])
def clip(request: pytest.FixtureRequest, tiny_clip: CLIP) -> CLIP:
    checkpoint = Checkpoint(tiny_clip.config, tiny_clip.state_dict(), "tiny", tiny_clip.preprocess)
    return build(with_activation(checkpoint, request.param))
