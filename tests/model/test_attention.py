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
    no_prompts, chosen = (
        torch.zeros(0, 2, 1, 2, 32),
        torch.zeros(1, 0, dtype=torch.bool),
    )
    (row,) = attention.prompted_maps(tower, pixels[0], no_prompts, (0, 1), chosen)[
        "class"
    ]
    wanted = torch.stack([block[0, :, 0] for block in all_weights(tower, pixels[:1])])
    assert row[0] == 0 and wanted.std() > 1e-2
    torch.testing.assert_close(row[1:], wanted.mean(dim=(0, 1)), atol=SUM, rtol=FEATURE)


@torch.no_grad()
def test_rows_are_those_of_one_prompt_at_a_time(
    tiny_clip: CLIP, pixels: Tensor, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = tiny_clip.require_vit()
    chosen = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1]]).bool()
    actual = attention.prompted_maps(tower, pixels[1], prompts, (0, 1), chosen)
    alone = {block: Prefix(prompts[1:2, block]) for block in (0, 1)}
    every = {block: Prefix(prompts[:, block].reshape(1, 6, 2, 32)) for block in (0, 1)}
    for row, prefix in enumerate((None, alone, every)):
        weights = all_weights(tower, pixels[1:2], prefix)
        for kind, make in (("class", class_attention), ("rollout", rollout)):
            torch.testing.assert_close(
                actual[kind][row], make(weights)[0], atol=SUM, rtol=FEATURE
            )
    for maps in actual.values():
        assert maps.shape == (3, 1 + 1 + 16) and maps.min() >= 0
        torch.testing.assert_close(maps.sum(dim=1), torch.ones(3), atol=FEATURE, rtol=0)
        assert (
            maps[0, 0] == 0 and maps[1:, 0].min() > 0
        )  # the first has no prompt to look at
    assert difference(actual["class"][0], actual["class"][1]) > 0.01
    monkeypatch.setattr(attention, "_BYTES", 1)  # one row at a time
    again = attention.prompted_maps(tower, pixels[1], prompts, (0, 1), chosen)
    for kind, maps in actual.items():
        torch.testing.assert_close(again[kind], maps, atol=SUM, rtol=FEATURE)


@torch.no_grad()
def test_rollout_is_a_product_of_matrices(
    tiny_clip: CLIP, pixels: Tensor, prompts: Any
) -> None:
    """Prompts as states that nothing leaves, the class token's row of their product."""
    tower = tiny_clip.require_vit()
    prefix = {block: Prefix(prompts[:1, block]) for block in (0, 1)}
    weights = all_weights(tower, pixels, prefix)
    T, P = weights[0].shape[2], 2
    product = torch.eye(P + T).expand(len(pixels), -1, -1)
    for block in weights:
        complete = torch.zeros(len(pixels), P + T, P + T)
        complete[:, :P, :P] = torch.eye(P)
        complete[:, P:] = block.mean(dim=1) / 2
        complete[:, P:, P:] += torch.eye(T) / 2
        product = complete @ product
    wanted = product[:, P]
    actual = rollout(weights)
    torch.testing.assert_close(
        actual[:, 0], wanted[:, :P].sum(dim=1), atol=SUM, rtol=FEATURE
    )
    torch.testing.assert_close(actual[:, 1:], wanted[:, P:], atol=SUM, rtol=FEATURE)


def test_patches_are_read_row_by_row() -> None:
    grid = patch_grid(torch.arange(18.0)[None])  # prompts, class token, 16 patches
    assert grid.shape == (1, 4, 4) and grid[0, 1].tolist() == [6, 7, 8, 9]


def test_difference_is_the_share_that_moved() -> None:
    one, other = torch.tensor([0.0, 0.5, 0.5, 0.0]), torch.tensor([0.0, 0.2, 0.5, 0.3])
    assert difference(one, other) == pytest.approx(0.3)
    assert difference(one, one) == 0
