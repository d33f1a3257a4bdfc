"""The image tower with prompts against the same tower written out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.model.block import Prefix
from cliquetta.model.clip import CLIP
from cliquetta.model.vision import TokenPrompts
from tests._helpers.literal_towers import all_features, assert_same_gradients, draw, image_features
from tests._helpers.tolerance import FEATURE, SUM


def test_no_prompts_is_exactly_the_plain_tower(clip: CLIP, tiny_images: Tensor) -> None:
    plain = clip.encode_image(tiny_images)
    assert torch.equal(clip.encode_image(tiny_images, prefix={}), plain)
    tower = clip.require_vit()
    assert torch.equal(tower.pool(tower.run(tower.embed(tiny_images))), plain)
    masked = Prefix(draw(10, 2, 2, 32), torch.zeros(10, 2, dtype=torch.bool))
    torch.testing.assert_close(
        clip.encode_image(tiny_images, prefix={1: masked}), plain, atol=SUM, rtol=FEATURE
    )


@pytest.mark.parametrize("prompted", [False, True])
def test_blocks_run_in_pieces(clip: CLIP, tiny_images: Tensor, prompted: bool) -> None:
    tower = clip.require_vit()
    prefix = {1: Prefix(draw(10, 2, 2, 32))} if prompted else None
    complete = tower.run(tower.embed(tiny_images), prefix=prefix)
    middle = tower.run(tower.embed(tiny_images), 0, 1)
    assert middle.shape == (10, 17, 32)
    assert torch.equal(tower.run(middle, 1, prefix=prefix), complete)
    assert torch.equal(tower.run(middle, 1, 1), middle)
    every = tower.run(middle, 1, 2, prefix=prefix)
    torch.testing.assert_close(every[:, :1], complete, atol=FEATURE, rtol=FEATURE)
    assert every.shape == (10, 17, 32) and complete.shape == (10, 1, 32)


@pytest.mark.parametrize("position", ["after-class", "end"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (1, 3, 2)])  # one layer, two, one per image
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
