"""Array functions that corruptions are made of, of float32 pictures (N, H, W, C) of any size.

Separable filters are written as one small matrix per axis, which holds any boundary
rule exactly.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_BLOCK = 32  # rows of a filter matrix that are applied at a time
_LEAST = 1e-8  # weights of a kernel below this are left out
# weights of a kernel up to which a sum over shifted pictures is the faster way
_FEW_TAPS = 25


class Draws:
    """Random numbers of which each picture has its own stream, whatever else is in the batch."""

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        self.generators = generators

    def normal(self, *shape: int) -> Floats:
        """The standard normal distribution: ``shape`` numbers for each picture."""
        return np.stack([g.standard_normal(shape, np.float32) for g in self.generators])

    def uniform(self, low: float, high: float, *shape: int) -> Floats:
        """From ``low`` to ``high``: ``shape`` numbers for each picture."""
        unit = np.stack([g.random(shape, np.float32) for g in self.generators])
        return np.float32(low) + np.float32(high - low) * unit

    def integers(self, low: int, high: int, *shape: int) -> NDArray[np.int64]:
        """From ``low`` to ``high - 1``: ``shape`` integers for each picture."""
        return np.stack([g.integers(low, high, shape) for g in self.generators])

    def poisson(self, rates: Floats) -> Floats:
        """Counts with the given rates (N, ...)."""
        drawn = [
            g.poisson(rate) for g, rate in zip(self.generators, rates, strict=True)
        ]
        return np.stack(drawn).astype(np.float32)


def luma(images: Floats) -> Floats:
    """Brightness by ITU-R 601 as (N, H, W, 1)."""
    return images @ np.array([[0.299], [0.587], [0.114]], np.float32)


def fold(index: NDArray[np.int64], size: int, rule: str) -> NDArray[np.int64]:
    """Fold indices into 0..size-1: ``nearest`` aaa|ab, ``symmetric`` cba|ab, ``reflect`` dcb|ab."""
    if rule == "nearest" or size == 1:
        return np.clip(index, 0, size - 1)
    period = 2 * size - (2 if rule == "reflect" else 0)
    index = np.abs(index) if rule == "reflect" else index
    index = index % period
    return np.where(
        index < size, index, period - (0 if rule == "reflect" else 1) - index
    )


def apply_axes(images: Floats, rows: Floats, columns: Floats) -> Floats:
    """Multiply the vertical axis by ``rows`` (H', H) and the horizontal one by ``columns``."""
    planes = np.ascontiguousarray(np.moveaxis(images, 3, 1))
    return np.moveaxis(apply_to_planes(planes, rows, columns), 1, 3)


def apply_to_planes(planes: Floats, rows: Floats, columns: Floats) -> Floats:
    """:func:`apply_axes` of planes (N, C, H, W); blocks of a matrix skip what they do not reach."""
    high = np.empty((*planes.shape[:2], len(rows), planes.shape[3]), np.float32)
    for block, seen in _blocks(rows):
        np.matmul(rows[block, seen], planes[:, :, seen], out=high[:, :, block])
    out = np.empty((*high.shape[:3], len(columns)), np.float32)
    for block, seen in _blocks(columns):
        out[..., block] = high[..., seen] @ columns[block, seen].T
    return out


def _blocks(matrix: Floats) -> Iterator[tuple[slice, slice]]:
    """Blocks of the rows of a matrix, and the columns beyond which each block is zero."""
    for start in range(0, len(matrix), _BLOCK):
        block = slice(start, start + _BLOCK)
        used = np.flatnonzero(matrix[block].any(axis=0))
        yield (
            block,
            slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1),
        )


def _line_filter(
    size: int, offsets: NDArray[np.int64], sigma: float, rule: str
) -> NDArray[np.float64]:
    """(size, size): a Gaussian at some offsets of each point, of sum one."""
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    matrix = np.zeros((size, size))
    targets = np.broadcast_to(np.arange(size)[:, None], (size, len(offsets)))
    sources = fold(targets + offsets, size, rule)
    np.add.at(
        matrix,
        (targets, sources),
        np.broadcast_to(weights / weights.sum(), sources.shape),
    )
    return matrix


def gaussian_blur(
    images: Floats, sigma: float, rule: str = "nearest", truncate: float = 4.0
) -> Floats:
    """Blur both axes with the same Gaussian, cut at ``truncate`` sigmas."""
    radius = int(truncate * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    rows, columns = (
        _line_filter(size, offsets, max(sigma, 1e-12), rule).astype(np.float32)
        for size in images.shape[1:3]
    )
    return apply_axes(images, rows, columns)


@lru_cache(maxsize=128)
def zoom_matrix(size: int, factor: float) -> Floats:
    """(size, size): stretch the middle of an axis ``factor`` times by linear interpolation."""
    part = math.ceil(size / factor)
    stretched = max(round(part * factor), size)
    step = (part - 1) / (stretched - 1) if stretched > 1 else 0.0
    position = (np.arange(size) + (stretched - size) // 2) * step
    low = np.clip(np.floor(position).astype(np.int64), 0, max(part - 2, 0))
    share = position - low
    start = (size - part) // 2
    matrix = np.zeros((size, size))
    np.add.at(matrix, (np.arange(size), start + low), 1 - share)
    np.add.at(matrix, (np.arange(size), start + np.minimum(low + 1, part - 1)), share)
    return matrix.astype(np.float32)


def zoom(planes: Floats, factor: float) -> Floats:
    """Enlarge the middle of each plane (N, C, H, W) ``factor`` times; the size stays."""
    height, width = planes.shape[2:]
    return apply_to_planes(
        planes, zoom_matrix(height, factor), zoom_matrix(width, factor)
    )


def disk_kernel(radius: float, alias_blur: float) -> Floats:
    """A disk of ``radius`` pixels whose edge is softened by a small Gaussian."""
    reach = 8 if radius <= 8 else math.ceil(radius)
    line = np.arange(-reach, reach + 1)
    disk = (line[:, None] ** 2 + line**2 <= radius**2).astype(np.float32)
    near = np.arange(-1, 2) if radius <= 8 else np.arange(-2, 3)
    soft = _line_filter(len(line), near, alias_blur, "reflect")
    kernel: Floats = (soft @ (disk / disk.sum()) @ soft.T).astype(np.float32)
    return kernel


def convolve(images: Floats, kernel: Floats) -> Floats:
    """Correlate channels with a point-symmetric odd kernel; borders mirror without the edge."""
    height, width = images.shape[1:3]
    reach = kernel.shape[0] // 2
    rows = fold(np.arange(-reach, height + reach), height, "reflect")
    columns = fold(np.arange(-reach, width + reach), width, "reflect")
    padded = images[:, rows][:, :, columns]
    taps = np.argwhere(kernel > _LEAST)
    if len(taps) <= _FEW_TAPS:
        out = np.zeros_like(images)
        for i, j in taps:
            out += kernel[i, j] * padded[:, i : i + height, j : j + width]
        return out
    return np.moveaxis(
        _convolve_planes(np.moveaxis(padded, 3, 1), kernel, height, width), 1, 3
    )


def _convolve_planes(padded: Floats, kernel: Floats, height: int, width: int) -> Floats:
    """Planes (N, C, H + 2r, W + 2r): each pair of equal kernel rows is a matrix product."""
    padded = np.ascontiguousarray(padded)
    out = np.zeros((*padded.shape[:2], height, width), np.float32)
    reach = kernel.shape[0] // 2
    offsets = np.arange(kernel.shape[1])
    for i in range(reach + 1):
        used = offsets[kernel[i] > _LEAST]
        if not len(used):
            continue
        lines = padded[:, :, i : i + height]
        if i < reach:
            lines = lines + padded[:, :, 2 * reach - i : 2 * reach - i + height]
        first, last = used[0], used[-1] + 1
        band = np.zeros((_BLOCK + last - first - 1, _BLOCK), np.float32)
        for column in range(_BLOCK):
            band[column : column + last - first, column] = kernel[i, first:last]
        for start in range(0, width, _BLOCK):
            size = min(_BLOCK, width - start)
            seen = lines[..., start + first : start + size + last - 1]
            out[..., start : start + size] += seen @ band[: seen.shape[-1], :size]
    return out


def motion_blur(images: Floats, radius: int, sigma: float, degrees: Floats) -> Floats:
    """Smear along each direction as ImageMagick: half a Gaussian of 2 radius + 1 pixel steps."""
    count, height, width, channels = images.shape
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    weights = weights / weights.sum()
    angles = np.deg2rad(degrees.astype(np.float64)).reshape(-1, 1)
    down = np.ceil(steps * np.sin(angles) - 0.5).astype(np.int64)
    right = np.ceil(steps * np.cos(angles) - 0.5).astype(np.int64)
    pixels = images.reshape(-1, channels)
    first = np.arange(count)[:, None, None] * (height * width)
    out = np.zeros((count, height, width, channels), np.float32)
    # Steps that together weigh less than a hundredth of a grey level are left out.
    for i in steps[np.cumsum(weights[::-1])[::-1] > 4e-5]:
        y = np.clip(np.arange(height) + down[:, i, None], 0, height - 1)
        x = np.clip(np.arange(width) + right[:, i, None], 0, width - 1)
        positions = first + y[:, :, None] * width + x[:, None, :]
        out += np.float32(weights[i]) * np.take(pixels, positions, axis=0)
    return out


def sample(images: Floats, y: Floats, x: Floats, rule: str) -> Floats:
    """Bilinear interpolation at fractional positions (N, H, W) of each picture."""
    count, height, width, channels = images.shape
    pixels = images.reshape(-1, channels)
    first = np.arange(count)[:, None, None] * (height * width)
    top, left = np.floor(y).astype(np.int64), np.floor(x).astype(np.int64)
    down, right = (y - top)[..., None], (x - left)[..., None]
    rows = [first + fold(top + i, height, rule) * width for i in (0, 1)]
    columns = [fold(left + i, width, rule) for i in (0, 1)]
    upper, lower = (
        np.take(pixels, row + columns[0], axis=0) * (1 - right)
        + np.take(pixels, row + columns[1], axis=0) * right
        for row in rows
    )
    blended: Floats = upper * (1 - down) + lower * down
    return blended.astype(np.float32)


def plasma(draws: Draws, height: int, width: int, decay: float) -> Floats:
    """(N, H, W, 1) cloud maps in 0..1 by the diamond-square algorithm on a torus.

    Each halving of the grid sets new points to the mean of their four neighbours plus
    noise whose amplitude falls by ``decay`` squared, as in the published program.
    """
    side = 2 ** max(1, (max(height, width) - 1).bit_length())
    count = len(draws.generators)
    field = np.zeros((count, side, side))
    amplitude, step = 100.0**2, side
    while step >= 2:
        half, cells = step // 2, side // step
        noise = amplitude * draws.uniform(-1, 1, 3, cells, cells)
        corners = field[:, ::step, ::step]
        square = corners + np.roll(corners, -1, axis=1)
        middles = (square + np.roll(square, -1, axis=2)) / 4 + noise[:, 0]
        field[:, half::step, half::step] = middles
        tops = (
            middles
            + np.roll(middles, 1, axis=1)
            + corners
            + np.roll(corners, -1, axis=2)
        )
        field[:, ::step, half::step] = tops / 4 + noise[:, 1]
        sides = (
            middles
            + np.roll(middles, 1, axis=2)
            + corners
            + np.roll(corners, -1, axis=1)
        )
        field[:, half::step, ::step] = sides / 4 + noise[:, 2]
        step, amplitude = half, amplitude / decay**2
    field -= field.min(axis=(1, 2), keepdims=True)
    field /= field.max(axis=(1, 2), keepdims=True)
    return field[:, :height, :width, None].astype(np.float32)
