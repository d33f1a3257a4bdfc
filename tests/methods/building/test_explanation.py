"""Tensors of an explanation, as they are stored; every method explains at least plain CLIP."""

import torch
from torch import Tensor

from cliquetta.methods.base import Adapter
from cliquetta.methods.building.explanation import Explanation
from cliquetta.model.attention import Kind
from cliquetta.types import Batch
from tests._helpers.building import prepare
from tests._helpers.tolerance import FEATURE


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
    prediction = adapter.predict(prepare(adapter, batch))
    explanation = adapter.explain(batch[:4], prediction)
    features = adapter.model.encode_image(batch.images[:4], normalize=True)
    torch.testing.assert_close(explanation.features, features, atol=FEATURE, rtol=0)
    zero_shot = (features @ adapter.zero_shot_classifier.T).argmax(dim=1)
    assert torch.equal(explanation.before, zero_shot)
