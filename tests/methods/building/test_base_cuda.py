"""The contract of every registered method where a GPU computes; `make test-gpu` runs it."""

import pytest
import torch

from cliquetta.methods.building.base import NonFiniteError
from cliquetta.methods.building.registry import MethodEntry
from cliquetta.types import Batch
from tests._helpers.building import assert_same_state, build_adapter
from tests._helpers.tiny import build_tiny_clip
from tests._helpers.tiny_world import TINY_PROMPTS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="what a GPU makes of NaN")
def test_a_gpu_refuses_pixels_that_are_not_finite(
    entry: MethodEntry, batch: Batch
) -> None:
    """One pixel of the third image: it is named, nothing is learned, and the stream goes on."""
    adapter = build_adapter(entry, build_tiny_clip().cuda(), TINY_PROMPTS)
    adapter.predict(batch[0:4])
    before = adapter.state_dict()
    spoilt = batch.images[:4].clone()
    spoilt[2, 1, 5, 7] = torch.nan

    with pytest.raises(NonFiniteError, match=r"1 of 4 images .* number 2 \(image-2\)"):
        adapter.predict(Batch(spoilt, batch.keys[:4]))
    assert_same_state(adapter, before)
    assert adapter.predict(batch[4:8]).logits.isfinite().all()
