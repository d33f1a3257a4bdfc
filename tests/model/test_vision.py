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
    "shapes",
    [[(3, 32)], [(3, 32), (3, 32)], [(3, 2, 32)]],
    ids=["one layer", "two layers", "one per image"],
)
def test_token_prompts(
    clip: CLIP, tiny_images: Tensor, position: Any, shapes: list[tuple[int, ...]]
) -> None:
    layers = [
        draw(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)
    ]
    ours = clip.encode_image(tiny_images[:3], tokens=TokenPrompts(layers, position))

    def of_image(image: int) -> list[Tensor]:
        return [layer if layer.ndim == 2 else layer[image] for layer in layers]

    literal = all_features(
        image_features,
        clip,
        tiny_images[:3],
        tokens=of_image,
        position=position,
    )
    assert_same_gradients(ours, literal, layers)
