"""Key/value prefixes in the attention of a block, against a literal tower."""

import dataclasses

import pytest
import torch
from torch import Tensor

from cliquetta.model.block import Prefix
from cliquetta.model.clip import CLIP
from tests._helpers.literal_towers import (
    all_features,
    assert_same_gradients,
    draw,
    image_features,
)
from tests._helpers.tolerance import FEATURE, SUM


@pytest.mark.parametrize("rows", [1, 3])  # one prefix for all images, or one each
@pytest.mark.parametrize("at", [(0,), (1,), (0, 1)])
def test_prefixes_and_gradients(
    clip: CLIP, tiny_images: Tensor, at: tuple[int, ...], rows: int
) -> None:
    images = tiny_images[:3]
    tokens = [draw(rows, 4, 2, 32, seed=i).requires_grad_() for i in at]
    ours = clip.encode_image(
        images, prefix={i: Prefix(t) for i, t in zip(at, tokens, strict=True)}
    )

    def own(image: int) -> dict[int, Tensor]:
        return {i: t[image % rows] for i, t in zip(at, tokens, strict=True)}

    literal = all_features(image_features, clip, images, prefix=own)
    assert_same_gradients(ours, literal, tokens)


def test_ragged_prefixes_equal_one_at_a_time(clip: CLIP, tiny_images: Tensor) -> None:
    # four images with no, one, three and two prompts of three that there is room for
    counts = torch.tensor([0, 1, 3, 2])
    tokens = draw(4, 3, 2, 32).requires_grad_()
    real = torch.arange(3) < counts[:, None]
    ours = clip.encode_image(tiny_images[:4], prefix={1: Prefix(tokens, real)})
    for row, count in enumerate(counts.tolist()):
        prefix = {1: Prefix(tokens[[row], :count])} if count else None
        alone = clip.encode_image(tiny_images[[row]], prefix=prefix)
        torch.testing.assert_close(ours[[row]], alone, atol=SUM, rtol=FEATURE)

    # what fills up the room gets no gradient, and every prompt gets one
    (gradient,) = torch.autograd.grad(ours.square().sum(), tokens)
    assert (gradient[~real] == 0).all()
    assert (gradient[real].abs().amax(dim=-1) > 0).all()


def test_bad_prompts_are_refused(tiny_clip: CLIP, tiny_images: Tensor) -> None:
    with pytest.raises(ValueError, match="prefix tokens"):
        Prefix(draw(2, 3, 32))
    with pytest.raises(ValueError, match="mask"):
        Prefix(draw(2, 3, 2, 32), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="block"):
        tiny_clip.encode_image(tiny_images, prefix={2: Prefix(draw(1, 1, 2, 32))})
    frozen = Prefix(draw(1, 1, 2, 32))
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.mask = None  # type: ignore[misc]


def test_a_packed_row_is_a_causal_row(clip: CLIP) -> None:
    """Five tokens in five slots: nothing is padded."""
    block = clip.require_text().block(0)
    tokens = draw(5, 32)
    place = torch.arange(5)
    packed = block.packed(tokens, slots=place, tokens=place, length=5)
    plain = block(tokens[None], causal=True)[0]
    torch.testing.assert_close(packed, plain, atol=SUM, rtol=FEATURE)
