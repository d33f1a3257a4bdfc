"""Images cut into a grid of patches: what DeYO and Panda shuffle."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def split_patches(images: Tensor, grid: int) -> Tensor:
    """Patches (B, grid², 3, h, w) of images (B, 3, S, S), row by row.

    A side that ``grid`` does not divide is reduced to the next one that it does.
    """
    side = images.shape[-1] // grid * grid
    if side != images.shape[-1]:
        images = F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)
    B, C = images.shape[:2]
    cells = images.view(B, C, grid, side // grid, grid, side // grid)
    return cells.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def join_patches(patches: Tensor, size: int) -> Tensor:
    """Images (B, 3, size, size) of patches (B, grid², 3, h, w), row by row."""
    B, cells, C, h, w = patches.shape
    grid = round(cells**0.5)
    images = patches.view(B, grid, grid, C, h, w).permute(0, 3, 1, 4, 2, 5)
    images = images.reshape(B, C, grid * h, grid * w)
    if images.shape[-1] == size:
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
