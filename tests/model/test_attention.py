"""Attention maps: means, sums, literal rollout, prompts one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.model import attention
from cliquetta.model.attention import class_attention, difference, patch_grid, rollout
from cliquetta.model.block import Prefix
from cliquetta.model.clip import CLIP
from tests._helpers.tolerance import FEATURE, SUM


@pytest.fixture(scope="module")
def prompts() -> Tensor:
    """Three cliques' prompts of two tokens for both blocks of the tiny tower, large on purpose."""
    return 3 * torch.randn(3, 2, 2, 2, 32, generator=torch.Generator().manual_seed(4))


def all_weights(tower: Any, pixels: Tensor, prefix: Any = None) -> list[Tensor]:
    actual = tower.attention(pixels, range(len(tower.blocks)), prefix=prefix)
    return [actual[index] for index in sorted(actual)]


@torch.no_grad()
def test_plain_maps_are_means_over_heads_and_blocks(
    tiny_clip: CLIP, pixels: Tensor
) -> None:
    """The attention itself is compared with that of transformers in test_huggingface.py."""
    tower = tiny_clip.require_vit()
    maps = attention.prompted_maps(
        tower,
        pixels[0],
        torch.zeros(0, 2, 1, 2, 32),
        (0, 1),
        torch.zeros(1, 0, dtype=torch.bool),  # one row, of no prompts
    )
    (row,) = maps["class"]
    weights = all_weights(tower, pixels[:1])
    of_class_token = torch.stack([block[0, :, 0] for block in weights])
    assert of_class_token.std() > 1e-2
    expected = of_class_token.mean(dim=(0, 1))
    assert row[0] == 0
    torch.testing.assert_close(row[1:], expected, atol=SUM, rtol=FEATURE)


@pytest.fixture
def maps_of_rows(tiny_clip: CLIP, pixels: Tensor, prompts: Any) -> Any:
    """Makes maps of the second image with no prompt, with the second, and with all three."""
    chosen = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1]]).bool()

    @torch.no_grad()
    def make() -> Any:
        tower = tiny_clip.require_vit()
        return attention.prompted_maps(tower, pixels[1], prompts, (0, 1), chosen)

    return make


@torch.no_grad()
def test_rows_are_those_of_one_prompt_at_a_time(
    tiny_clip: CLIP, pixels: Tensor, prompts: Any, maps_of_rows: Any
) -> None:
    actual = maps_of_rows()
    second = {block: Prefix(prompts[1:2, block]) for block in (0, 1)}
    every = {block: Prefix(prompts[:, block].reshape(1, 6, 2, 32)) for block in (0, 1)}
    for row, prefix in enumerate((None, second, every)):
        weights = all_weights(tiny_clip.require_vit(), pixels[1:2], prefix)
        of_class = class_attention(weights)[0]
        rolled_out = rollout(weights)[0]
        torch.testing.assert_close(
            actual["class"][row], of_class, atol=SUM, rtol=FEATURE
        )
        torch.testing.assert_close(
            actual["rollout"][row], rolled_out, atol=SUM, rtol=FEATURE
        )


def test_maps_are_shares_of_prompts_class_token_and_patches(maps_of_rows: Any) -> None:
    actual = maps_of_rows()
    for maps in actual.values():
        assert maps.shape == (3, 1 + 1 + 16)
        assert maps.min() >= 0
        torch.testing.assert_close(maps.sum(dim=1), torch.ones(3), atol=FEATURE, rtol=0)
        # the first has no prompt to look at
        assert maps[0, 0] == 0
        assert maps[1:, 0].min() > 0
    plain, prompted, _ = actual["class"]
    assert difference(plain, prompted) > 0.01


def test_maps_of_one_row_at_a_time_are_the_same(
    maps_of_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = maps_of_rows()
    monkeypatch.setattr(attention, "_BYTES", 1)
    apart = maps_of_rows()
    for kind, maps in together.items():
        torch.testing.assert_close(apart[kind], maps, atol=SUM, rtol=FEATURE)


@torch.no_grad()
def test_rollout_is_a_product_of_matrices(
    tiny_clip: CLIP, pixels: Tensor, prompts: Any
) -> None:
    """Prompts as states that nothing leaves, the class token's row of their product."""
    tower = tiny_clip.require_vit()
    prefix = {block: Prefix(prompts[:1, block]) for block in (0, 1)}
    weights = all_weights(tower, pixels, prefix)
    T = weights[0].shape[2]  # tokens
    P = 2  # prompts, which come first
    product = torch.eye(P + T).expand(len(pixels), -1, -1)
    for block in weights:
        # half of a token stays where it is, half moves by the attention
        complete = torch.zeros(len(pixels), P + T, P + T)
        complete[:, :P, :P] = torch.eye(P)
        complete[:, P:] = block.mean(dim=1) / 2
        complete[:, P:, P:] += torch.eye(T) / 2
        product = complete @ product

    of_class_token = product[:, P]
    of_prompts = of_class_token[:, :P].sum(dim=1)
    of_tokens = of_class_token[:, P:]
    actual = rollout(weights)
    torch.testing.assert_close(actual[:, 0], of_prompts, atol=SUM, rtol=FEATURE)
    torch.testing.assert_close(actual[:, 1:], of_tokens, atol=SUM, rtol=FEATURE)


def test_patches_are_read_row_by_row() -> None:
    grid = patch_grid(torch.arange(18.0)[None])  # prompts, class token, 16 patches
    assert grid.shape == (1, 4, 4)
    assert grid[0, 1].tolist() == [6, 7, 8, 9]


def test_difference_is_the_share_that_moved() -> None:
    one = torch.tensor([0.0, 0.5, 0.5, 0.0])
    other = torch.tensor([0.0, 0.2, 0.5, 0.3])
    assert difference(one, other) == pytest.approx(0.3)
    assert difference(one, one) == 0
