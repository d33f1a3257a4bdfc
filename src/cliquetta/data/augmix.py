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
    "autocontrast",
    "equalize",
    "posterize",
    "rotate",
    "solarize",
    "shear-x",
    "shear-y",
    "translate-x",
    "translate-y",
)
_CHAINS = 3
_DEPTH = 3
# Severity 1 draws a level that always rounds to 0, which leaves four bits.
_POSTERIZE_BITS = 4
# Pillow truncates sums in float64; in float32 a sum such as 99.998 stands for 100.
_FLOAT_SLACK = 4e-3

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recipe:
    """Random choices of AugMix for V views of one image."""

    # (V, 3, 3): which, by chain and depth; -1 behind its end.
    operation: npt.NDArray[np.int64]
    # (V, 3, 3): strength in (0.1, 1), negative where the sign is.
    level: Reals
    # (V, 3): share of each chain in the mixture.
    weights: Reals
    # (V,): share of the image without operations.
    plain: Reals


def draw_recipe(count: int, generator: np.random.Generator) -> Recipe:
    """Draw chains of one to three operations, w ~ Dirichlet(1, 1, 1), m ~ Beta(1, 1)."""
    shape = (count, _CHAINS, _DEPTH)
    operation = generator.integers(0, len(OPERATIONS), size=shape)
    depth = generator.integers(1, _DEPTH + 1, size=(count, _CHAINS, 1))

    strength = generator.uniform(0.1, 1.0, size=shape)
    negative = generator.random(shape) < 0.5

    # Operations behind the end of a chain are none, -1.
    return Recipe(
        operation=np.where(np.arange(_DEPTH) < depth, operation, -1),
        level=np.where(negative, -1.0, 1.0) * strength,
        weights=generator.dirichlet(np.ones(_CHAINS), size=count),
        plain=generator.beta(1.0, 1.0, size=count),
    )


def augmix_chains(pictures: Tensor, recipes: Sequence[Recipe]) -> Tensor:
    """Return the ends of the three chains, (B, V, 3, C, S, S), of views (B, V, C, S, S) uint8."""
    B, V, C, S, _ = pictures.shape

    # Every chain starts from the picture itself: (B * V * 3, C, S, S).
    starts = pictures[:, :, None].expand(B, V, _CHAINS, C, S, S)
    chains = starts.reshape(-1, C, S, S).clone()

    # One row for each chain of each view: (B * V * 3, depth).
    operation = np.stack([recipe.operation for recipe in recipes]).reshape(-1, _DEPTH)
    level = np.stack([recipe.level for recipe in recipes]).reshape(-1, _DEPTH)

    # All pictures that meet the same operation at the same depth go together.
    for depth in range(_DEPTH):
        for index, name in enumerate(OPERATIONS):
            chosen = np.flatnonzero(operation[:, depth] == index)
            if not len(chosen):
                continue

            rows = torch.from_numpy(chosen).to(pictures.device)
            levels = level[chosen, depth]
            chains[rows] = apply_operation(name, chains[rows], levels)
    return chains.view(B, V, _CHAINS, C, S, S)


def mix(plain: Tensor, chains: Tensor, recipes: Sequence[Recipe]) -> Tensor:
    """Return m · plain + (1 − m) · Σ w_i · chain_i, on normalised pixels (B, V, 3, S, S)."""
    # w: (B, V, 3)
    chain_weights = np.stack([recipe.weights for recipe in recipes])
    weights = torch.from_numpy(chain_weights).to(plain)

    # (B, V, 3, S, S), a weighted mean over the chains of each view.
    mixture = torch.einsum("bvk,bvkchw->bvchw", weights, chains)

    # m: (B, V)
    shares = np.stack([recipe.plain for recipe in recipes])
    share = torch.from_numpy(shares).to(plain)[..., None, None, None]
    return share * plain + (1 - share) * mixture


def apply_operation(name: str, pictures: Tensor, level: Reals) -> Tensor:
    """Apply one operation of :data:`OPERATIONS` to pictures (R, C, S, S) uint8, ``level`` (R,)."""
    if name == "autocontrast":
        return _autocontrast(pictures)
    if name == "equalize":
        return _equalize(pictures)
    if name == "posterize":
        return pictures & (256 - (1 << (8 - _POSTERIZE_BITS)))
    if name == "solarize":
        return _solarize(pictures, level)
    size = pictures.shape[-1]
    if name == "rotate":
        matrix = _rotation(level, size)
    elif name.startswith("shear"):
        matrix = _shear(name, level)
    else:
        matrix = _translation(name, level, size)
    return _affine(pictures, matrix)


def _solarize(pictures: Tensor, level: Reals) -> Tensor:
    """Invert the values above a threshold, which falls from 256 as the level grows."""
    levels = 256 - np.trunc(np.abs(level) * 25.6)
    threshold = torch.from_numpy(levels).to(pictures.device).view(-1, 1, 1, 1)
    return torch.where(pictures < threshold, pictures, 255 - pictures)


def _autocontrast(pictures: Tensor) -> Tensor:
    """Stretch each channel to 0 ... 255."""
    values = pictures.to(torch.int32)
    low = values.amin(dim=(2, 3), keepdim=True)
    high = values.amax(dim=(2, 3), keepdim=True)

    # A flat channel has no contrast to stretch.
    extent = (high - low).clamp(min=1)

    # In integers; Pillow's float table may fall short of one.
    stretched = (values - low) * 255 // extent
    return torch.where(high > low, stretched, values).to(torch.uint8)


def _equalize(pictures: Tensor) -> Tensor:
    """Flatten each channel's histogram."""
    # One histogram for each channel: (R, C, 256).
    flat = pictures.flatten(2).to(torch.int64)
    R, C, pixels = flat.shape
    counts = torch.zeros(R, C, 256, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))

    # Pixels for each new level: all but those of the highest level, over 255.
    highest = flat.amax(dim=2, keepdim=True)
    last = counts.gather(2, highest)
    step = (pixels - last) // 255

    # The new level of an old one grows with the pixels below it: (R, C, 256).
    below = counts.cumsum(dim=2) - counts
    table = (below + step // 2) // step.clamp(min=1)
    table = table.clamp(max=255)

    # Too few pixels for one step: leave the channel as it is.
    unchanged = torch.arange(256, device=flat.device)
    table = torch.where(step > 0, table, unchanged)
    return table.gather(2, flat).view_as(pictures).to(torch.uint8)


def _rotation(level: Reals, size: int) -> Reals:
    """Return affine maps (R, 2, 3) that turn by up to 3 degrees around the centre."""
    angle = -np.radians(np.trunc(level * 3.0))
    cos = np.cos(angle)
    sin = np.sin(angle)
    matrix = _identity(level)

    matrix[:, 0, 0] = cos
    matrix[:, 0, 1] = sin
    matrix[:, 1, 0] = -sin
    matrix[:, 1, 1] = cos

    # The centre stays where it is.
    centre = size / 2
    matrix[:, :, 2] = centre - centre * matrix[:, :, :2].sum(axis=2)
    return matrix


def _shear(name: str, level: Reals) -> Reals:
    """Return affine maps (R, 2, 3) that slant by up to 0.03 pixels per pixel."""
    row = 0 if name == "shear-x" else 1
    matrix = _identity(level)
    matrix[:, row, 1 - row] = level * 0.03
    return matrix


def _translation(name: str, level: Reals, size: int) -> Reals:
    """Return affine maps (R, 2, 3) that move by whole pixels, up to a thirtieth of the size."""
    row = 0 if name == "translate-x" else 1
    matrix = _identity(level)
    matrix[:, row, 2] = np.trunc(level * size / 30)
    return matrix


def _identity(level: Reals) -> Reals:
    """Return one map (R, 2, 3) from output to input pixels for each level, which moves nothing."""
    return np.tile(np.eye(2, 3), (len(level), 1, 1))


def _affine(pictures: Tensor, matrix: Reals) -> Tensor:
    """Sample bilinearly at ``matrix`` (R, 2, 3) times the pixel centres; black outside."""
    R, _, S, _ = pictures.shape
    maps = torch.from_numpy(matrix).to(pictures.device, torch.float32)
    linear = maps[:, :, :2].transpose(1, 2)
    offset = maps[:, None, :, 2]

    # Centres of the output pixels (S * S, 2), and where each is read (R, S * S, 2).
    centre = torch.arange(S, device=pictures.device) + 0.5
    grid = torch.stack(torch.meshgrid(centre, centre, indexing="xy"), dim=-1)
    point = grid.view(1, -1, 2) @ linear + offset
    inside = ((point >= 0) & (point < S)).all(dim=-1).view(R, 1, S, S)

    # grid_sample counts from -1 to 1.
    position = (point * (2 / S) - 1).view(R, S, S, 2)
    values = F.grid_sample(
        pictures.float(),
        position,
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )

    # Black is outside the picture; the cut to integers is Pillow's.
    return ((values + _FLOAT_SLACK) * inside).to(torch.uint8)
