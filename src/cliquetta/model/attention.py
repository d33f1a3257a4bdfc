"""Attention maps of the class token, plain and under prompts.

A map is a row of 1 + T numbers that sum to one: the shares of prompts, class token and
patches. For SigLIP, which has no class token (share 0), it is that of the pooling
query.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cliquetta.model.block import Prefix
from cliquetta.model.vision import VisionTower

Kind = Literal["class", "rollout"]
KINDS: tuple[Kind, ...] = ("class", "rollout")

_BYTES = 2**28  # attention weights that are held at once


def class_attention(weights: Sequence[Tensor]) -> Tensor:
    """The class token's attention (B, 1 + T), mean over heads and blocks.

    ``weights`` are (B, heads, T, P + T) per block, prefix columns first; P may differ.
    """
    rows = [_fold(block[:, :, 0].mean(dim=1), block.shape[2]) for block in weights]
    return torch.stack(rows).mean(dim=0)


def rollout(weights: Sequence[Tensor], share: Tensor | None = None) -> Tensor:
    """Attention rollout (B, 1 + T): shares that make up the class token after the last block.

    ``share`` (B, T) weighs the tokens after the last block, if not that one alone. Each
    block mixes half its input with half its attention, mean over heads; what goes to
    its prefix stays there.
    """
    tokens = weights[0].shape[2]
    if share is None:
        share = weights[0].new_zeros(weights[0].shape[0], tokens)
        share[:, 0] = 1
    prompts = share.new_zeros(len(share), 1)
    for block in reversed(weights):
        seen = _fold(torch.einsum("bt,bts->bs", share, block.mean(dim=1)), tokens)
        prompts = prompts + seen[:, :1] / 2
        share = (share + seen[:, 1:]) / 2
    return torch.cat([prompts, share], dim=1)


def _fold(row: Tensor, tokens: int) -> Tensor:
    """A row (B, P + T) with its prefix columns summed, (B, 1 + T)."""
    prefix = row.shape[1] - tokens
    return torch.cat([row[:, :prefix].sum(dim=1, keepdim=True), row[:, prefix:]], dim=1)


def patch_grid(maps: Tensor) -> Tensor:
    """The patches' part (..., g, g) of maps (..., 1 + T), row by row from the upper left corner."""
    patches = maps[..., 2:]
    side = round(patches.shape[-1] ** 0.5)
    return patches.reshape(*patches.shape[:-1], side, side)


def difference(maps: Tensor, other: Tensor) -> Tensor:
    """Share of attention that differs between two maps: total variation, 0 to 1."""
    return (maps - other).abs().sum(dim=-1) / 2


@torch.no_grad()
def prompted_maps(
    tower: VisionTower,
    pixels: Tensor,
    prompts: Tensor,
    blocks: Sequence[int],
    chosen: Tensor,
) -> dict[Kind, Tensor]:
    """Maps (R, 1 + T) of one image from block ``blocks[0]`` on, each under a choice of prompts.

    ``pixels`` (3, H, W); ``prompts`` (S, B, P, 2, D) of S cliques for the B prompted
    ``blocks``; ``chosen`` (R, S) says which prompts the image gets in each row: none of
    them is plain CLIP.
    """
    S, _, P, _, D = prompts.shape
    first, last = blocks[0], len(tower.blocks)
    size = tower.config.patches + tower.config.class_tokens
    per_row = tower.config.heads * size * (size + S * P) * (last - first) * 4
    step = max(1, _BYTES // per_row)
    maps: dict[Kind, list[Tensor]] = {"class": [], "rollout": []}
    together = prompts.transpose(0, 1).reshape(len(blocks), 1, S * P, 2, D)
    for start in range(0, len(chosen), step):
        rows = chosen[start : start + step].to(pixels.device)
        seen = rows.repeat_interleave(P, dim=1)
        prefix = {
            block: Prefix(tokens.expand(len(rows), -1, -1, -1), seen)
            for block, tokens in zip(blocks, together, strict=True)
        }
        images = pixels.expand(len(rows), *pixels.shape)
        read = range(first, last if tower.head is None else last + 1)
        weights = tower.attention(images, read, prefix=prefix if S else None)
        ordered = [weights[index] for index in range(first, last)]
        if tower.head is None:
            maps["class"].append(class_attention(ordered))
            maps["rollout"].append(rollout(ordered))
        else:
            pooled = weights[last].mean(dim=1)[:, 0]
            maps["class"].append(F.pad(pooled, (2, 0)))
            prompts_share, share = rollout(ordered, pooled).tensor_split([1], dim=1)
            maps["rollout"].append(
                torch.cat([prompts_share, F.pad(share, (1, 0))], dim=1)
            )
    return {kind: torch.cat(parts) for kind, parts in maps.items()}
