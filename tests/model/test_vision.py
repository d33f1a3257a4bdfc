"""The image tower with prompts against the same tower written out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.model.block import Prefix
from cliquetta.model.checkpoints.state import Checkpoint, build
from cliquetta.model.clip import CLIP
from cliquetta.model.vision import TokenPrompts
from tests._helpers.literal_towers import assert_same_gradients, draw, image_features
from tests._helpers.tolerance import FEATURE, SUM


def test_plain_features(clip: CLIP, tiny_images: Tensor) -> None:
    literal = torch.stack([image_features(clip, image) for image in tiny_images])
    torch.testing.assert_close(clip.encode_image(tiny_images), literal, atol=FEATURE, rtol=FEATURE)


@pytest.mark.parametrize("at", [(0,), (1,), (0, 1)])
def test_prefix_features_and_gradients(
    clip: CLIP, tiny_images: Tensor, at: tuple[int, ...]
) -> None:
    images = tiny_images[:3]
    tokens = [draw(3, 4, 2, 32, seed=i).requires_grad_() for i in at]
    ours = clip.encode_image(images, prefix={i: Prefix(t) for i, t in zip(at, tokens, strict=True)})
    literal = torch.stack(
        [
            image_features(clip, image, prefix={i: t[row] for i, t in zip(at, tokens, strict=True)})
            for row, image in enumerate(images)
        ]
    )
    assert_same_gradients(ours, literal, tokens)


def test_one_prefix_for_all_rows(clip: CLIP, tiny_images: Tensor) -> None:
    shared = draw(1, 2, 2, 32).requires_grad_()
    ours = clip.encode_image(tiny_images[:3], prefix={1: Prefix(shared)})
    literal = torch.stack(
        [image_features(clip, image, prefix={1: shared[0]}) for image in tiny_images[:3]]
    )
    assert_same_gradients(ours, literal, [shared])


def test_ragged_prefixes_equal_one_at_a_time(clip: CLIP, tiny_images: Tensor) -> None:
    counts = [0, 1, 3, 2]
    tokens = draw(4, 3, 2, 32).requires_grad_()
    mask = torch.arange(3) < torch.tensor(counts)[:, None]
    ours = clip.encode_image(tiny_images[:4], prefix={1: Prefix(tokens, mask)})
    alone = [
        clip.encode_image(
            tiny_images[row : row + 1],
            prefix={1: Prefix(tokens[row : row + 1, :count])} if count else None,
        )[0]
        for row, count in enumerate(counts)
    ]
    torch.testing.assert_close(ours, torch.stack(alone), atol=SUM, rtol=FEATURE)
    (gradient,) = torch.autograd.grad(ours.square().sum(), tokens)
    assert torch.equal(gradient[~mask], torch.zeros_like(gradient[~mask]))
    assert (gradient[mask].abs().amax(dim=-1) > 0).all()


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
    whole = tower.run(tower.embed(tiny_images), prefix=prefix)
    middle = tower.run(tower.embed(tiny_images), 0, 1)
    assert middle.shape == (10, 17, 32)
    assert torch.equal(tower.run(middle, 1, prefix=prefix), whole)
    nothing = tower.run(middle, 1, 1)
    assert torch.equal(nothing, middle)


def test_all_tokens_at_the_last_boundary(clip: CLIP, tiny_images: Tensor) -> None:
    tower = clip.require_vit()
    every = tower.run(tower.embed(tiny_images), 0, 2)
    only_class = tower.run(tower.embed(tiny_images))
    torch.testing.assert_close(every[:, :1], only_class, atol=FEATURE, rtol=FEATURE)
    assert every.shape == (10, 17, 32) and only_class.shape == (10, 1, 32)


@pytest.mark.parametrize("position", ["after-class", "end"])
@pytest.mark.parametrize("depth", [1, 2])
def test_token_prompts(clip: CLIP, tiny_images: Tensor, position: Any, depth: int) -> None:
    layers = [draw(3, 32, seed=i).requires_grad_() for i in range(depth)]
    ours = clip.encode_image(tiny_images[:3], tokens=TokenPrompts(layers, position))
    literal = torch.stack(
        [image_features(clip, image, tokens=layers, position=position) for image in tiny_images[:3]]
    )
    assert_same_gradients(ours, literal, layers)


def test_token_prompts_per_image(clip: CLIP, tiny_images: Tensor) -> None:
    layer = draw(3, 2, 32).requires_grad_()
    ours = clip.encode_image(tiny_images[:3], tokens=TokenPrompts([layer]))
    literal = torch.stack(
        [image_features(clip, tiny_images[i], tokens=[layer[i]]) for i in range(3)]
    )
    assert_same_gradients(ours, literal, [layer])


def test_attention_rows_sum_to_one_and_see_the_prefix(clip: CLIP, tiny_images: Tensor) -> None:
    tower = clip.require_vit()
    mask = torch.tensor([[True, True, False]]).expand(10, -1)
    prefix = {1: Prefix(draw(10, 3, 2, 32), mask)}
    maps = tower.attention(tiny_images, [0, 1], prefix=prefix)
    assert maps[0].shape == (10, 2, 17, 17) and maps[1].shape == (10, 2, 17, 20)
    for weights in maps.values():
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(10, 2, 17))
    assert (maps[1][..., 2] == 0).all() and (maps[1][..., :2] > 0).all()


def test_no_gradients_on_weights(clip: CLIP, tiny_images: Tensor) -> None:
    prefix = draw(1, 2, 2, 32).requires_grad_()
    clip.encode_image(tiny_images[:2], prefix={1: Prefix(prefix)}).sum().backward()
    assert prefix.grad is not None
    assert all(not p.requires_grad and p.grad is None for p in clip.parameters())
    assert not clip.encode_image(tiny_images[:2]).requires_grad
    assert not clip.training


@pytest.mark.parametrize(("dtype", "cosine"), [(torch.bfloat16, 0.995), (torch.float16, 0.9999)])
def test_half_precision_is_close(
    tiny_clip: CLIP, tiny_images: Tensor, dtype: Any, cosine: float
) -> None:
    checkpoint = Checkpoint(tiny_clip.config, tiny_clip.state_dict(), "tiny", tiny_clip.preprocess)
    half = build(checkpoint, dtype=dtype)
    prefix = draw(10, 2, 2, 32)
    for visual in (None, {1: Prefix(prefix)}):
        a = tiny_clip.encode_image(tiny_images, normalize=True, prefix=visual)
        b = half.encode_image(tiny_images, normalize=True, prefix=visual)
        assert b.dtype == torch.float32 and half.dtype == dtype
        assert (a * b).sum(dim=-1).min() > cosine
    assert half.scale == tiny_clip.scale


def test_the_tower_traces_as_one_graph(tiny_clip: CLIP, tiny_images: Tensor) -> None:
    tower = tiny_clip.require_vit()
    prefix = Prefix(draw(10, 2, 2, 32))
    compiled = torch.compile(
        lambda x, t: tower(x, prefix={1: Prefix(t)}), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(
        compiled(tiny_images, prefix.tokens),
        tower(tiny_images, prefix={1: prefix}),
        atol=FEATURE,
        rtol=FEATURE,
    )


def test_bad_prompts_are_refused(tiny_clip: CLIP, tiny_images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"\(R, P, 2, D\)"):
        Prefix(draw(2, 3, 32))
    with pytest.raises(ValueError, match="does not fit"):
        Prefix(draw(2, 3, 2, 32), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="block 2"):
        tiny_clip.encode_image(tiny_images, prefix={2: Prefix(draw(1, 1, 2, 32))})
    frozen = Prefix(draw(1, 1, 2, 32))
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.mask = None  # type: ignore[misc]
