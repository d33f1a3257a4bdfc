"""Corruptions as functions of pictures in 0..1 (N, H, W, 3), constants and random numbers.

Results may leave 0..1. ``corruptions.py`` names the functions and holds the constants.
"""

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cliquetta.data import filters
from cliquetta.data.bundled import load_bundled
from cliquetta.data.filters import Draws, Floats

Constants = tuple[float, ...]
SHIP = 1754


def gaussian_noise(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Add normal noise."""
    return x + np.float32(c[0]) * draws.normal(*x.shape[1:])


def shot_noise(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Count photons: c[0] of them make full brightness."""
    return draws.poisson(x * np.float32(c[0])) / np.float32(c[0])


def impulse_noise(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Set a share c[0] of all values to black or white, half each."""
    chance = draws.uniform(0, 1, *x.shape[1:])
    return np.where(chance < c[0] / 2, 0, np.where(chance < c[0], 1, x)).astype(
        np.float32
    )


def defocus_blur(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Blur with a soft disk."""
    return filters.convolve(x, filters.disk_kernel(c[0], c[1]))


def glass_blur(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Blur, let each pixel take the value of a near one (last row first), blur again.

    The paper says that near pixels are shuffled. The program that made its data writes
    through views of one array, which copies instead of swapping; we do what made the
    data.
    """
    sigma, reach, rounds = c[0], round(c[1]), round(c[2])
    count, height, width, _ = x.shape
    rows, columns = (
        np.arange(height - reach, reach, -1),
        np.arange(width - reach, reach, -1),
    )
    positions = (rows[:, None] * width + columns).ravel()
    moves = draws.integers(-reach, reach, 2, rounds * len(positions))
    others = np.tile(positions, rounds) + moves[:, 0] * width + moves[:, 1]
    order = _copied(
        height * width, positions, others.reshape(count, rounds, len(positions))
    )
    blurred = filters.gaussian_blur(x, sigma).reshape(count, height * width, 3)
    shuffled = np.take_along_axis(blurred, order[..., None], axis=1)
    return filters.gaussian_blur(shuffled.reshape(x.shape), sigma)


def _copied(
    size: int, positions: NDArray[np.int64], others: NDArray[np.int64]
) -> NDArray[np.int64]:
    """0..size-1 of each picture after copying others[0] to positions[0], then others[1] to ...

    ``positions`` fall, in every round of ``others`` (N, rounds, n). A copy reads what
    an earlier one of its round wrote if its source is behind it, so that values come
    along chains of such sources; their ends are computed for all positions at once, by
    doubling the steps.
    """
    count, rounds, _ = others.shape
    everywhere = np.arange(count * size).reshape(count, size)
    order = everywhere.ravel()
    for round in range(rounds):
        sources = everywhere.copy()
        sources[:, positions] = others[:, round] + everywhere[:, :1]
        end = np.maximum(sources, everywhere).ravel()
        while True:
            further = end[end]
            if np.array_equal(further, end):
                break
            end = further
        order = order[sources.ravel()[end]]
    return order.reshape(count, size) - everywhere[:, :1]


def motion_blur(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Smear each picture in a direction between -45 and 45 degrees."""
    return filters.motion_blur(x, round(c[0]), c[1], draws.uniform(-45, 45))


def zoom_blur(x: Floats, c: Constants, draws: Draws) -> Floats:
    """The mean of the picture and of ever larger copies; c is the end and step of the factors."""
    factors = np.arange(1, c[0], c[1])
    planes = np.ascontiguousarray(np.moveaxis(x, 3, 1))
    total = planes.copy()
    for factor in factors:
        total += filters.zoom(planes, float(factor))
    return np.moveaxis(total / np.float32(len(factors) + 1), 1, 3)


def snow(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Whiten the picture, then add smeared flakes and the same flakes turned by 180 degrees."""
    mean, spread, factor, threshold, radius, sigma, share = c
    _, height, width, _ = x.shape
    flakes = np.float32(mean) + np.float32(spread) * draws.normal(1, height, width)
    flakes = np.moveaxis(filters.zoom(flakes, factor), 1, 3)
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1)).astype(np.float32)
    layer = filters.motion_blur(flakes, round(radius), sigma, draws.uniform(-135, -45))
    whitened = np.maximum(x, filters.luma(x) * 1.5 + 0.5)
    mixed: Floats = np.float32(share) * x + np.float32(1 - share) * whitened
    return mixed + layer + layer[:, ::-1, ::-1]


def frost(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Ice over the picture: rough bluish patches crossed by bright ridges, drawn by fractals."""
    height, width = x.shape[1:3]
    patches = filters.plasma(draws, height, width, 1.5)
    ridges = 1 - np.abs(2 * filters.plasma(draws, height, width, 1.4) - 1)
    ice = 0.25 + 0.45 * patches + 0.3 * ridges**2
    tint = np.array([0.88, 0.95, 1.0], np.float32)
    frozen: Floats = np.float32(c[0]) * x + np.float32(c[1]) * (ice * tint).astype(
        np.float32
    )
    return frozen


def fog(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Add a cloud map of strength c[0] and roughness c[1]; the brightest value stays."""
    strength = np.float32(c[0])
    peak = x.max(axis=(1, 2, 3), keepdims=True)
    foggy = x + strength * filters.plasma(draws, x.shape[1], x.shape[2], c[1])
    dimmed: Floats = foggy * peak / (peak + strength)
    return dimmed


def brightness(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Raise V of HSV: hue and saturation stay if all channels grow by the same factor."""
    value = x.max(axis=3, keepdims=True)
    raised = np.clip(value + np.float32(c[0]), 0, 1)
    out: Floats = np.where(value > 0, x * (raised / np.maximum(value, 1e-6)), raised)
    return out


def contrast(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Draw every value towards the mean of its channel."""
    means = x.mean(axis=(1, 2), keepdims=True)
    out: Floats = (x - means) * np.float32(c[0]) + means
    return out


def elastic_transform(x: Floats, c: Constants, draws: Draws) -> Floats:
    """A random affine map, then a smooth random field; c is in parts of the shorter side."""
    count, height, width, _ = x.shape
    alpha, sigma, shake = (part * min(height, width) for part in c)
    y, across = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    middle, arm = np.array([width // 2, height // 2]), min(height, width) // 3
    corners = middle + max(arm, 1) * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = corners + draws.uniform(-shake, shake, 3, 2)
    # Each new position is read at the old one: the map that takes the moved corners
    # back. Corners shaken onto one line have no such map; the pseudo-inverse gives the
    # nearest one.
    ones = np.ones((count, 3, 1))
    back = np.linalg.pinv(np.concatenate([moved, ones], axis=2)) @ corners
    positions = np.stack([across, y, np.ones_like(y)], axis=-1) @ back[:, None]
    image = filters.sample(x, positions[..., 1], positions[..., 0], "reflect")
    field = np.moveaxis(draws.uniform(-1, 1, 2, height, width), 1, 3)
    field = alpha * filters.gaussian_blur(field, sigma, "symmetric", truncate=3)
    return filters.sample(image, y + field[..., 0], across + field[..., 1], "symmetric")


def pixelate(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Shrink to a share c[0] of the size and enlarge again, both with a box filter."""
    height, width = x.shape[1:3]
    small = max(1, int(width * c[0])), max(1, int(height * c[0]))
    box = Image.Resampling.BOX
    return _each(x, lambda image: image.resize(small, box).resize((width, height), box))


def jpeg_compression(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Save as JPEG of quality c[0]."""

    def compress(image: Image.Image) -> Image.Image:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=round(c[0]))
        return Image.open(buffer)

    return _each(x, compress)


def _each(x: Floats, change: Callable[[Image.Image], Image.Image]) -> Floats:
    """Let Pillow change every picture of a batch."""
    levels = np.rint(x * 255).astype(np.uint8)
    changed = np.stack([np.asarray(change(Image.fromarray(image))) for image in levels])
    return changed.astype(np.float32) / np.float32(255)


def greyscale(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Towards grey."""
    return x + np.float32(c[0]) * (filters.luma(x) - x)


def edges(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Towards a drawing: the Sobel gradient of the brightness, dark on white, at full contrast."""
    height, width = x.shape[1:3]
    grey = filters.luma(x)
    across = filters.apply_axes(grey, _three(height, 1, 2, 1), _three(width, -1, 0, 1))
    down = filters.apply_axes(grey, _three(height, -1, 0, 1), _three(width, 1, 2, 1))
    strength = np.hypot(across, down)
    peak = strength.max(axis=(1, 2, 3), keepdims=True)
    drawing: Floats = 1 - strength / np.maximum(peak, 1e-6)
    return x + np.float32(c[0]) * (drawing - x)


def double_exposure(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Blend all with one bundled ship of weight c[0]: most pictures look like one of its class."""
    height, width = x.shape[1:3]
    ship = Image.fromarray(load_bundled().images[SHIP]).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return x + np.float32(c[0]) * (np.asarray(ship, np.float32) / np.float32(255) - x)


def _three(size: int, *weights: float) -> Floats:
    """(size, size): a filter of three neighbouring points; beyond the border the edge repeats."""
    matrix = np.zeros((size, size), np.float32)
    for offset, weight in zip((-1, 0, 1), weights, strict=True):
        sources = filters.fold(np.arange(size) + offset, size, "nearest")
        np.add.at(matrix, (np.arange(size), sources), weight)
    return matrix
