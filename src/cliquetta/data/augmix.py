"""AugMix at severity 1 on 8-bit tensors, for all views at once; operations are Pillow's.

Autocontrast alone may be one level apart, where Pillow's float table falls short of an
integer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

OPERATIONS = (
    *("autocontrast", "equalize", "posterize", "rotate", "solarize"),
    *("shear-x", "shear-y", "translate-x", "translate-y"),
)
_CHAINS, _DEPTH = 3, 3
# severity 1 draws a level that always rounds to 0, which leaves four bits
_POSTERIZE_BITS = 4

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recipe:
    """Random choices of AugMix for V views of one image."""

    operation: npt.NDArray[
        np.int64
    ]  # (V, 3, 3): which, by chain and depth; -1 behind its end
    level: Reals  # (V, 3, 3): strength in (0.1, 1), negative where the sign is
    weights: Reals  # (V, 3): share of each chain in the mixture
    plain: Reals  # (V,): share of the image without operations


def draw_recipe(count: int, generator: np.random.Generator) -> Recipe:
    """Chains of one to three operations, w ~ Dirichlet(1, 1, 1), m ~ Beta(1, 1)."""
    shape = (count, _CHAINS, _DEPTH)
    operation = generator.integers(0, len(OPERATIONS), size=shape)
    depth = generator.integers(1, _DEPTH + 1, size=(count, _CHAINS, 1))
    operation = np.where(np.arange(_DEPTH) < depth, operation, -1)
    level = generator.uniform(0.1, 1.0, size=shape)
    sign = np.where(generator.random(shape) < 0.5, -1.0, 1.0)
    weights = generator.dirichlet(np.ones(_CHAINS), size=count)
    return Recipe(
        operation, level * sign, weights, generator.beta(1.0, 1.0, size=count)
    )


def augmix_chains(pictures: Tensor, recipes: Sequence[Recipe]) -> Tensor:
    """The ends of the three chains, (B, V, 3, C, S, S) uint8, of views (B, V, C, S, S) uint8."""
    B, V, C, S, _ = pictures.shape
    chains = (
        pictures[:, :, None].expand(B, V, _CHAINS, C, S, S).reshape(-1, C, S, S).clone()
    )
    operation = np.stack([recipe.operation for recipe in recipes]).reshape(-1, _DEPTH)
    level = np.stack([recipe.level for recipe in recipes]).reshape(-1, _DEPTH)
    for depth in range(_DEPTH):
        for index, name in enumerate(OPERATIONS):
            chosen = np.flatnonzero(operation[:, depth] == index)
            if len(chosen):
                rows = torch.from_numpy(chosen).to(pictures.device)
                chains[rows] = apply_operation(name, chains[rows], level[chosen, depth])
    return chains.view(B, V, _CHAINS, C, S, S)


def mix(plain: Tensor, chains: Tensor, recipes: Sequence[Recipe]) -> Tensor:
    """M · plain + (1 − m) · Σ w_i · chain_i, on normalised pixels (B, V, 3, S, S)."""
    share = torch.from_numpy(np.stack([recipe.plain for recipe in recipes])).to(plain)
    weights = torch.from_numpy(np.stack([recipe.weights for recipe in recipes])).to(
        plain
    )
    mixture = torch.einsum("bvk,bvkchw->bvchw", weights, chains)
    share = share[..., None, None, None]
    return share * plain + (1 - share) * mixture


def apply_operation(name: str, pictures: Tensor, level: Reals) -> Tensor:
    """One operation of :data:`OPERATIONS` on pictures (R, C, S, S) uint8, ``level`` (R,) each."""
    size = pictures.shape[-1]
    if name == "autocontrast":
        return _autocontrast(pictures)
    if name == "equalize":
        return _equalize(pictures)
    if name == "posterize":
        return pictures & (256 - (1 << (8 - _POSTERIZE_BITS)))
    if name == "solarize":
        threshold = torch.from_numpy(256 - np.trunc(np.abs(level) * 25.6)).to(
            pictures.device
        )
        return torch.where(
            pictures < threshold.view(-1, 1, 1, 1), pictures, 255 - pictures
        )
    return _affine(pictures, _matrix(name, level, size))


def _autocontrast(pictures: Tensor) -> Tensor:
    """Each channel stretched to 0 ... 255."""
    values = pictures.to(torch.int32)
    low, high = (
        values.amin(dim=(2, 3), keepdim=True),
        values.amax(dim=(2, 3), keepdim=True),
    )
    stretched = (values - low) * 255 // (high - low).clamp(min=1)
    return torch.where(high > low, stretched, values).to(torch.uint8)


def _equalize(pictures: Tensor) -> Tensor:
    """Each channel's histogram flattened."""
    flat = pictures.flatten(2).to(torch.int64)  # (R, C, P)
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(dim=2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    before = counts.cumsum(dim=2) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=flat.device))
    return table.gather(2, flat).view_as(pictures).to(torch.uint8)


def _matrix(name: str, level: Reals, size: int) -> Reals:
    """Affine maps (R, 2, 3) from output to input pixels."""
    strength, sign = np.abs(level), np.sign(level)
    matrix = np.tile(np.eye(2, 3), (len(level), 1, 1))
    if name == "rotate":
        angle = -np.radians(sign * np.trunc(strength * 3.0))
        cos, sin = np.cos(angle), np.sin(angle)
        matrix[:, 0, 0], matrix[:, 0, 1], matrix[:, 1, 0], matrix[:, 1, 1] = (
            cos,
            sin,
            -sin,
            cos,
        )
        centre = size / 2
        matrix[:, :, 2] = centre - centre * matrix[:, :, :2].sum(axis=2)
    elif name.startswith("shear"):
        cell = (0, 1) if name == "shear-x" else (1, 0)
        matrix[(slice(None), *cell)] = sign * strength * 0.03
    else:
        row = 0 if name == "translate-x" else 1
        matrix[:, row, 2] = sign * np.trunc(strength * size / 30)
    return matrix


def _affine(pictures: Tensor, matrix: Reals) -> Tensor:
    """Bilinear sampling at ``matrix`` (R, 2, 3) times the pixel centres; black outside."""
    R, _, S, _ = pictures.shape
    maps = torch.from_numpy(matrix).to(pictures.device, torch.float32)
    centre = torch.arange(S, device=pictures.device) + 0.5
    grid = torch.stack(
        torch.meshgrid(centre, centre, indexing="xy"), dim=-1
    )  # (S, S, 2)
    point = grid.view(1, -1, 2) @ maps[:, :, :2].transpose(1, 2) + maps[:, None, :, 2]
    inside = ((point >= 0) & (point < S)).all(dim=-1).view(R, 1, S, S)
    position = (point * (2 / S) - 1).view(R, S, S, 2)
    values = F.grid_sample(
        pictures.float(),
        position,
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    return ((values + _FLOAT_SLACK) * inside).to(torch.uint8)


# Pillow truncates sums in float64; in float32 a sum such as 99.998 stands for 100.
_FLOAT_SLACK = 4e-3
