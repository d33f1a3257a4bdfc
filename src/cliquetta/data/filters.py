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
Integers = NDArray[np.int64]

# Rows of a filter matrix that are applied at a time.
_BLOCK = 32
# Weights of a kernel below this are left out.
_LEAST = 1e-8
# Weights of a kernel up to which a sum over shifted pictures is the faster way.
_FEW_TAPS = 25
# Steps of a smear that together weigh less than this, a hundredth of a grey level, are
# left out.
_LEAST_TAIL = 4e-5


class Draws:
    """Random numbers of which each picture has its own stream, whatever else is in the batch."""

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        self.generators = generators

    def normal(self, *shape: int) -> Floats:
        """Draw ``shape`` standard normal numbers for each picture."""
        return np.stack([g.standard_normal(shape, np.float32) for g in self.generators])

    def uniform(self, low: float, high: float, *shape: int) -> Floats:
        """Draw ``shape`` numbers from ``low`` to ``high`` for each picture."""
        unit = np.stack([g.random(shape, np.float32) for g in self.generators])
        return np.float32(low) + np.float32(high - low) * unit

    def integers(self, low: int, high: int, *shape: int) -> Integers:
        """Draw ``shape`` integers from ``low`` to ``high - 1`` for each picture."""
        return np.stack([g.integers(low, high, shape) for g in self.generators])

    def poisson(self, rates: Floats) -> Floats:
        """Draw counts with the given rates (N, ...)."""
        pairs = zip(self.generators, rates, strict=True)
        counts = [generator.poisson(rate) for generator, rate in pairs]
        return np.stack(counts).astype(np.float32)


def luma(images: Floats) -> Floats:
    """Return the brightness by ITU-R 601 as (N, H, W, 1)."""
    return images @ np.array([[0.299], [0.587], [0.114]], np.float32)


def fold(index: Integers, size: int, rule: str) -> Integers:
    """Fold indices into 0..size-1: ``nearest`` aaa|ab, ``symmetric`` cba|ab, ``reflect`` dcb|ab."""
    if rule == "nearest" or size == 1:
        return np.clip(index, 0, size - 1)
    if rule == "reflect":
        period = 2 * size - 2
        index = np.abs(index) % period
        mirrored = period - index
    else:
        period = 2 * size
        index = index % period
        mirrored = period - 1 - index

    return np.where(index < size, index, mirrored)


def apply_axes(images: Floats, rows: Floats, columns: Floats) -> Floats:
    """Multiply the vertical axis by ``rows`` (H', H) and the horizontal one by ``columns``."""
    planes = np.ascontiguousarray(np.moveaxis(images, 3, 1))
    return np.moveaxis(apply_to_planes(planes, rows, columns), 1, 3)


def apply_to_planes(planes: Floats, rows: Floats, columns: Floats) -> Floats:
    """Multiply both axes of planes (N, C, H, W); blocks of a matrix skip what they do not reach."""
    count, channels, _, width = planes.shape

    # Down: (N, C, H', W).
    high = np.empty((count, channels, len(rows), width), np.float32)
    for block, seen in _blocks(rows):
        np.matmul(rows[block, seen], planes[:, :, seen], out=high[:, :, block])

    # Across: (N, C, H', W').
    out = np.empty((count, channels, len(rows), len(columns)), np.float32)
    for block, seen in _blocks(columns):
        weights = columns[block, seen]
        out[..., block] = high[..., seen] @ weights.T
    return out


def _blocks(matrix: Floats) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of rows of a matrix, and the columns beyond which each block is zero."""
    for start in range(0, len(matrix), _BLOCK):
        block = slice(start, start + _BLOCK)

        # Between its first and last column that is not zero, a block is applied
        # whole.
        used = np.flatnonzero(matrix[block].any(axis=0))

        # A block that is zero reads one column, for the shape.
        if len(used):
            seen = slice(int(used[0]), int(used[-1]) + 1)
        else:
            seen = slice(0, 1)
        yield block, seen


def _line_filter(
    size: int, offsets: Integers, sigma: float, rule: str
) -> NDArray[np.float64]:
    """Return a Gaussian at some offsets of each point, of sum one, as a matrix (size, size)."""
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    weights = weights / weights.sum()

    # Every point (size, 1) reads at all offsets (taps,) from it.
    points = np.arange(size)[:, None]
    sources = fold(points + offsets, size, rule)
    targets = np.broadcast_to(points, sources.shape)

    # Folded sources may meet: their weights add up.
    matrix = np.zeros((size, size))
    weights = np.broadcast_to(weights, sources.shape)
    np.add.at(matrix, (targets, sources), weights)
    return matrix


def gaussian_blur(
    images: Floats, sigma: float, rule: str = "nearest", truncate: float = 4.0
) -> Floats:
    """Blur both axes with the same Gaussian, cut at ``truncate`` sigmas."""
    radius = int(truncate * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    positive = max(sigma, 1e-12)

    rows, columns = (
        _line_filter(size, offsets, positive, rule).astype(np.float32)
        for size in images.shape[1:3]
    )
    return apply_axes(images, rows, columns)


@lru_cache(maxsize=128)
def zoom_matrix(size: int, factor: float) -> Floats:
    """Return the matrix (size, size) that stretches the middle of an axis ``factor`` times.

    It interpolates linearly.
    """
    # The middle part of the axis, and how long it becomes.
    part = math.ceil(size / factor)
    start = (size - part) // 2
    stretched = max(round(part * factor), size)
    margin = (stretched - size) // 2
    step = (part - 1) / (stretched - 1) if stretched > 1 else 0.0

    # Each target lies between two neighbouring points of the part.
    targets = np.arange(size)
    position = (targets + margin) * step
    lower = np.floor(position).astype(np.int64)

    lower = np.clip(lower, 0, max(part - 2, 0))
    upper = np.minimum(lower + 1, part - 1)
    upper_share = position - lower

    # Each row holds the two shares, at their places in the middle of the axis.
    matrix = np.zeros((size, size))
    np.add.at(matrix, (targets, start + lower), 1 - upper_share)
    np.add.at(matrix, (targets, start + upper), upper_share)
    return matrix.astype(np.float32)


def zoom(planes: Floats, factor: float) -> Floats:
    """Enlarge the middle of each plane (N, C, H, W) ``factor`` times; the size stays."""
    height, width = planes.shape[2:]
    rows = zoom_matrix(height, factor)
    columns = zoom_matrix(width, factor)
    return apply_to_planes(planes, rows, columns)


def disk_kernel(radius: float, alias_blur: float) -> Floats:
    """Return a disk of ``radius`` pixels whose edge is softened by a small Gaussian."""
    if radius <= 8:
        reach = 8
        softened = 1
    else:
        reach = math.ceil(radius)
        softened = 2

    # The squared distance of each pixel from the middle one.
    line = np.arange(-reach, reach + 1)
    distance = line[:, None] ** 2 + line**2
    disk = (distance <= radius**2).astype(np.float32)

    # The Gaussian reaches one or two pixels, over both axes in turn.
    near = np.arange(-softened, softened + 1)
    soft = _line_filter(len(line), near, alias_blur, "reflect")
    softened_disk = soft @ (disk / disk.sum()) @ soft.T
    kernel: Floats = softened_disk.astype(np.float32)
    return kernel


def convolve(images: Floats, kernel: Floats) -> Floats:
    """Correlate channels with a point-symmetric odd kernel; borders mirror without the edge."""
    _, height, width, _ = images.shape
    reach = kernel.shape[0] // 2

    # Mirror the borders, each axis by an index.
    rows = fold(np.arange(-reach, height + reach), height, "reflect")
    columns = fold(np.arange(-reach, width + reach), width, "reflect")
    padded = images[:, rows][:, :, columns]

    # Few weights: a sum over shifted pictures; many: products of matrices.
    taps = np.argwhere(kernel > _LEAST)
    if len(taps) > _FEW_TAPS:
        planes = np.moveaxis(padded, 3, 1)
        convolved = _convolve_planes(planes, kernel, height, width)
        return np.moveaxis(convolved, 1, 3)

    out = np.zeros_like(images)
    for i, j in taps:
        out += kernel[i, j] * padded[:, i : i + height, j : j + width]
    return out


def _convolve_planes(padded: Floats, kernel: Floats, height: int, width: int) -> Floats:
    """Convolve planes (N, C, H + 2r, W + 2r), each pair of equal kernel rows by one matrix."""
    padded = np.ascontiguousarray(padded)
    count, channels, _, _ = padded.shape
    out = np.zeros((count, channels, height, width), np.float32)

    reach = kernel.shape[0] // 2
    for i in range(reach + 1):
        used = np.flatnonzero(kernel[i] > _LEAST)
        if not len(used):
            continue

        # Row i of the kernel equals row 2r - i: add the lines that both would meet.
        lines = padded[:, :, i : i + height]
        if i < reach:
            opposite = 2 * reach - i
            lines = lines + padded[:, :, opposite : opposite + height]

        band = _band(kernel[i, used[0] : used[-1] + 1])
        reached = len(band) - _BLOCK  # beyond the block itself

        # Multiply block by block along the lines.
        for start in range(0, width, _BLOCK):
            size = min(_BLOCK, width - start)
            first = start + used[0]
            seen = lines[..., first : first + size + reached]
            weights = band[: size + reached, :size]
            out[..., start : start + size] += seen @ weights
    return out


def _band(weights: Floats) -> Floats:
    """Return the matrix (_BLOCK + n - 1, _BLOCK) that applies n weights to a row of points."""
    taps = len(weights)
    band = np.zeros((_BLOCK + taps - 1, _BLOCK), np.float32)
    for column in range(_BLOCK):
        band[column : column + taps, column] = weights
    return band


def motion_blur(images: Floats, radius: int, sigma: float, degrees: Floats) -> Floats:
    """Smear along each direction as ImageMagick: half a Gaussian of 2 radius + 1 pixel steps."""
    count, height, width, channels = images.shape
    steps = np.arange(2 * radius + 1)

    # Half a Gaussian, and what weighs all from a step on.
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    weights = weights / weights.sum()
    tails = np.cumsum(weights[::-1])[::-1]

    # How far each step lies below and right of a pixel: (N, steps).
    angles = np.deg2rad(degrees.astype(np.float64)).reshape(-1, 1)
    down = np.ceil(steps * np.sin(angles) - 0.5).astype(np.int64)
    right = np.ceil(steps * np.cos(angles) - 0.5).astype(np.int64)

    # Sum the pictures shifted by every step that counts.
    pixels = images.reshape(-1, channels)
    first = _first_pixels(images)

    out = np.zeros((count, height, width, channels), np.float32)
    for step in steps[tails > _LEAST_TAIL]:
        rows = np.arange(height) + down[:, step, None]
        columns = np.arange(width) + right[:, step, None]

        # Beyond the border the edge repeats.
        y = np.clip(rows, 0, height - 1)
        x = np.clip(columns, 0, width - 1)

        # Numbers of the pixels in a list of all: (N, H, W).
        positions = first + y[:, :, None] * width + x[:, None, :]
        shifted = np.take(pixels, positions, axis=0)
        out += np.float32(weights[step]) * shifted
    return out


def sample(images: Floats, y: Floats, x: Floats, rule: str) -> Floats:
    """Interpolate bilinearly at fractional positions (N, H, W) of each picture."""
    _, height, width, channels = images.shape
    pixels = images.reshape(-1, channels)
    first = _first_pixels(images)
    top = np.floor(y).astype(np.int64)
    left = np.floor(x).astype(np.int64)

    # The four pixels around each position.
    left_columns = fold(left, width, rule)
    right_columns = fold(left + 1, width, rule)

    right_share = (x - left)[..., None]
    down_share = (y - top)[..., None]

    def interpolate_row(row: Integers) -> Floats:
        start = first + fold(row, height, rule) * width
        at_left = np.take(pixels, start + left_columns, axis=0)
        at_right = np.take(pixels, start + right_columns, axis=0)

        # Its neighbours' shares grow as they come nearer.
        between: Floats = at_left * (1 - right_share) + at_right * right_share
        return between

    upper = interpolate_row(top)
    lower = interpolate_row(top + 1)
    blended = upper * (1 - down_share) + lower * down_share
    return blended.astype(np.float32)


def _first_pixels(images: Floats) -> Integers:
    """Return the number of each picture's first pixel, (N, 1, 1), in a list of all pixels."""
    count, height, width, _ = images.shape
    first: Integers = np.arange(count)[:, None, None] * (height * width)
    return first


def plasma(draws: Draws, height: int, width: int, decay: float) -> Floats:
    """Draw (N, H, W, 1) cloud maps in 0..1 by the diamond-square algorithm on a torus.

    Each halving of the grid sets new points to the mean of their four neighbours plus
    noise whose amplitude falls by ``decay`` squared, as in the published program.
    """
    longer = max(height, width)

    # The grid is a power of two that covers the picture.
    side = 2 ** max(1, (longer - 1).bit_length())

    # Points of the torus, of which only the first is set: to zero.
    field = np.zeros((len(draws.generators), side, side))
    amplitude = 100.0**2
    step = side
    while step >= 2:
        half = step // 2
        cells = side // step
        noise = amplitude * draws.uniform(-1, 1, 3, cells, cells)
        corners = field[:, ::step, ::step]
        corners_below = np.roll(corners, -1, axis=1)
        corners_right = np.roll(corners, -1, axis=2)

        # Diamond step: the middle of each square lies between four corners.
        left_sides = corners + corners_below
        right_sides = np.roll(left_sides, -1, axis=2)
        middles = (left_sides + right_sides) / 4 + noise[:, 0]
        field[:, half::step, half::step] = middles

        # Square step: the middle of each edge lies between two middles and two corners.
        middles_above = np.roll(middles, 1, axis=1)
        tops = middles + middles_above + corners + corners_right
        field[:, ::step, half::step] = tops / 4 + noise[:, 1]
        middles_left = np.roll(middles, 1, axis=2)
        sides = middles + middles_left + corners + corners_below
        field[:, half::step, ::step] = sides / 4 + noise[:, 2]

        step = half
        amplitude = amplitude / decay**2

    # Stretch each map to 0..1.
    field -= field.min(axis=(1, 2), keepdims=True)
    field /= field.max(axis=(1, 2), keepdims=True)
    return field[:, :height, :width, None].astype(np.float32)
