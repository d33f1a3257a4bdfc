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

# Bytes of attention weights that are held at once.
_BYTES = 2**28


def class_attention(weights: Sequence[Tensor]) -> Tensor:
    """Average the class token's attention (B, 1 + T) over heads and blocks.

    ``weights`` are (B, heads, T, P + T) per block, prefix columns first; P may differ.
    """
    rows = [_fold(block[:, :, 0].mean(dim=1), block.shape[2]) for block in weights]
    return torch.stack(rows).mean(dim=0)


def rollout(weights: Sequence[Tensor], share: Tensor | None = None) -> Tensor:
    """Roll attention out (B, 1 + T): shares that make up the class token after the last block.

    ``share`` (B, T) weighs the tokens after the last block, if not that one alone. Each
    block mixes half its input with half its attention, mean over heads; what goes to
    its prefix stays there.
    """
    B, _, T, _ = weights[0].shape
    if share is None:
        share = weights[0].new_zeros(B, T)
        share[:, 0] = 1

    # From the last block back to the first.
    prompts = share.new_zeros(len(share), 1)

    for block in reversed(weights):
        attention = block.mean(dim=1)
        seen = _fold(torch.einsum("bt,bts->bs", share, attention), T)

        prompts = prompts + seen[:, :1] / 2
        share = (share + seen[:, 1:]) / 2
    return torch.cat([prompts, share], dim=1)


def _fold(row: Tensor, tokens: int) -> Tensor:
    """Sum the prefix columns of a row (B, P + T), which gives (B, 1 + T)."""
    prefix = row.shape[1] - tokens
    prompts = row[:, :prefix].sum(dim=1, keepdim=True)
    return torch.cat([prompts, row[:, prefix:]], dim=1)


def patch_grid(maps: Tensor) -> Tensor:
    """Arrange the patches of maps (..., 1 + T) as (..., g, g), from the upper left corner."""
    patches = maps[..., 2:]
    side = round(patches.shape[-1] ** 0.5)
    return patches.reshape(*patches.shape[:-1], side, side)


def difference(maps: Tensor, other: Tensor) -> Tensor:
    """Measure how much attention differs between two maps: total variation, 0 to 1."""
    return (maps - other).abs().sum(dim=-1) / 2


@torch.no_grad()
def prompted_maps(
    tower: VisionTower,
    pixels: Tensor,
    prompts: Tensor,
    blocks: Sequence[int],
    chosen: Tensor,
) -> dict[Kind, Tensor]:
    """Compute maps (R, 1 + T) of one image from block ``blocks[0]`` on, by choice of prompts.

    ``pixels`` (3, H, W); ``prompts`` (S, B, P, 2, D) of S cliques for the B prompted
    ``blocks``; ``chosen`` (R, S) says which prompts the image gets in each row: none of
    them is plain CLIP.
    """
    S, _, P, _, D = prompts.shape
    first = blocks[0]
    last = len(tower.blocks)
    has_head = tower.head is not None
    read = range(first, last + 1 if has_head else last)

    # Rows at once, by the bytes of their attention weights in float32.
    size = tower.config.patches + tower.config.class_tokens
    weights_per_block = tower.config.heads * size * (size + S * P)
    per_row = weights_per_block * (last - first) * 4
    step = max(1, _BYTES // per_row)

    # Prompts of all cliques in a row, of which a mask chooses: (B, 1, S * P, 2, D).
    together = prompts.transpose(0, 1).reshape(len(blocks), 1, S * P, 2, D)

    maps: dict[Kind, list[Tensor]] = {"class": [], "rollout": []}
    for start in range(0, len(chosen), step):
        rows = chosen[start : start + step].to(pixels.device)
        seen = rows.repeat_interleave(P, dim=1)
        prefix = {}
        for block, tokens in zip(blocks, together, strict=True):
            prefix[block] = Prefix(tokens.expand(len(rows), -1, -1, -1), seen)

        # The same image in every row.
        images = pixels.expand(len(rows), *pixels.shape)
        weights = tower.attention(images, read, prefix=prefix if S else None)
        ordered = [weights[index] for index in range(first, last)]
        if has_head:
            # Without a class token, the pooling query stands for it.
            pooled = weights[last].mean(dim=1)[:, 0]
            attended = F.pad(pooled, (2, 0))
            shares = rollout(ordered, pooled)
            rolled = torch.cat([shares[:, :1], F.pad(shares[:, 1:], (1, 0))], dim=1)
        else:
            attended = class_attention(ordered)
            rolled = rollout(ordered)
        maps["class"].append(attended)
        maps["rollout"].append(rolled)
    return {kind: torch.cat(parts) for kind, parts in maps.items()}
