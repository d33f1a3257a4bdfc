"""The image tower with prompts against the same tower written out."""

from typing import Any

import pytest
from torch import Tensor

from cliquetta.model.clip import CLIP
from cliquetta.model.vision import TokenPrompts
from tests._helpers.literal_towers import (
    all_features,
    assert_same_gradients,
    draw,
    image_features,
)


@pytest.mark.parametrize("position", ["after-class", "end"])
@pytest.mark.parametrize(
    "shape", [(1, 3), (2, 3), (1, 3, 2)]
)  # one layer, two, one per image
def test_token_prompts(
    clip: CLIP, tiny_images: Tensor, position: Any, shape: tuple[int, ...]
) -> None:
    layers = [draw(*shape[1:], 32, seed=i).requires_grad_() for i in range(shape[0])]
    ours = clip.encode_image(tiny_images[:3], tokens=TokenPrompts(layers, position))

    def own(image: int) -> list[Tensor]:
        return [layer if layer.ndim == 2 else layer[image] for layer in layers]

    how = {"tokens": own, "position": position}
    literal = all_features(image_features, clip, tiny_images[:3], **how)
    assert_same_gradients(ours, literal, layers)
