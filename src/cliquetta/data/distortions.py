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
SHIP = 1754  # number of the bundled picture that double_exposure blends in


def gaussian_noise(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Add normal noise."""
    return x + np.float32(c[0]) * draws.normal(*x.shape[1:])


def shot_noise(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Count photons: c[0] of them make full brightness."""
    return draws.poisson(x * np.float32(c[0])) / np.float32(c[0])


def impulse_noise(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Set a share c[0] of all values to black or white, half each."""
    share = c[0]
    chance = draws.uniform(0, 1, *x.shape[1:])

    # A value turns white below the share, and black below half of it.
    whitened = np.where(chance < share, 1, x)
    noisy = np.where(chance < share / 2, 0, whitened)
    return noisy.astype(np.float32)


def defocus_blur(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Blur with a soft disk."""
    return filters.convolve(x, filters.disk_kernel(c[0], c[1]))


def glass_blur(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Blur, let each pixel take the value of a near one (last row first), blur again.

    The paper says that near pixels are shuffled. The program that made its data writes
    through views of one array, which copies instead of swapping; we do what made the
    data.
    """
    sigma = c[0]
    reach = round(c[1])
    rounds = round(c[2])
    count, height, width, _ = x.shape

    # Pixels far enough from the border, from the last one to the first: (n,).
    rows = np.arange(height - reach, reach, -1)
    columns = np.arange(width - reach, reach, -1)
    positions = (rows[:, None] * width + columns).ravel()

    # The near pixel that each of them copies, in every round: (N, rounds, n).
    moves = draws.integers(-reach, reach, 2, rounds * len(positions))
    sources = np.tile(positions, rounds) + moves[:, 0] * width + moves[:, 1]
    sources = sources.reshape(count, rounds, len(positions))
    order = _resolve_copies(height * width, positions, sources)

    # Pixels of each picture in one row: (N, H * W, 3).
    blurred = filters.gaussian_blur(x, sigma).reshape(count, height * width, 3)
    shuffled = np.take_along_axis(blurred, order[..., None], axis=1)
    return filters.gaussian_blur(shuffled.reshape(x.shape), sigma)


def _resolve_copies(
    size: int, positions: NDArray[np.int64], sources: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return which of 0..size-1 ends up at each place after copying round by round.

    A round copies the value at ``sources[:, round, k]`` to ``positions[k]`` for k = 0,
    1, ...; ``positions`` (n,) fall, ``sources`` are (N, rounds, n), the result is
    (N, size). A copy reads what an earlier one of its round wrote if its source is
    behind it, so that values come along chains of such sources; their ends are computed
    for all positions at once, by doubling the steps.
    """
    count, rounds, _ = sources.shape
    places = np.arange(count * size).reshape(count, size)
    order = places.ravel()

    for round in range(rounds):
        source = places.copy()
        source[:, positions] = sources[:, round] + places[:, :1]
        # Follow sources that lie behind their target until none is left.
        end = np.maximum(source, places).ravel()
        while True:
            further = end[end]
            if np.array_equal(further, end):
                break
            end = further
        order = order[source.ravel()[end]]
    return order.reshape(count, size) - places[:, :1]


def motion_blur(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Smear each picture in a direction between -45 and 45 degrees."""
    direction = draws.uniform(-45, 45)
    return filters.motion_blur(x, round(c[0]), c[1], degrees=direction)


def zoom_blur(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Average the picture and ever larger copies; c is the end and step of the factors."""
    end, step = c
    factors = np.arange(1, end, step)
    planes = np.ascontiguousarray(np.moveaxis(x, 3, 1))
    total = planes.copy()
    for factor in factors:
        total += filters.zoom(planes, float(factor))

    # The picture itself is one of those averaged.
    copies = len(factors) + 1
    mean = total / np.float32(copies)
    return np.moveaxis(mean, 1, 3)


def snow(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Whiten the picture, then add smeared flakes and the same flakes turned by 180 degrees."""
    mean, spread, factor, threshold, radius, sigma, share = c
    _, height, width, _ = x.shape

    # Flakes are the peaks of enlarged noise: (N, H, W, 1).
    normal = draws.normal(1, height, width)
    noise = np.float32(mean) + np.float32(spread) * normal

    enlarged = np.moveaxis(filters.zoom(noise, factor), 1, 3)
    clipped = np.clip(enlarged, 0, 1)
    peaks = np.where(enlarged < threshold, 0, clipped)
    flakes = peaks.astype(np.float32)

    # They fall: the smear is within 45 degrees of the vertical.
    direction = draws.uniform(-135, -45)
    layer = filters.motion_blur(flakes, round(radius), sigma, degrees=direction)

    # The picture moves towards a bright grey copy of itself.
    grey = filters.luma(x) * 1.5 + 0.5
    whitened = np.maximum(x, grey)
    mixed: Floats = np.float32(share) * x + np.float32(1 - share) * whitened

    turned = layer[:, ::-1, ::-1]
    return mixed + layer + turned


def frost(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Ice over the picture: rough bluish patches crossed by bright ridges, drawn by fractals."""
    picture_share, ice_share = c
    height, width = x.shape[1:3]

    # Ridges are where a second fractal passes its middle value.
    patches = filters.plasma(draws, height, width, 1.5)
    crossing = filters.plasma(draws, height, width, 1.4)
    ridges = 1 - np.abs(2 * crossing - 1)
    ice = 0.25 + 0.45 * patches + 0.3 * ridges**2

    blue = np.array([0.88, 0.95, 1.0], np.float32)
    tinted = (ice * blue).astype(np.float32)

    # Both shares together may exceed one: frost also brightens.
    frozen: Floats = np.float32(picture_share) * x + np.float32(ice_share) * tinted
    return frozen


def fog(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Add a cloud map of strength c[0] and roughness c[1]; the brightest value stays."""
    strength = np.float32(c[0])
    roughness = c[1]
    _, height, width, _ = x.shape

    clouds = filters.plasma(draws, height, width, roughness)
    foggy = x + strength * clouds

    # Dim each picture so that its brightest value would not change without clouds.
    peak = x.max(axis=(1, 2, 3), keepdims=True)
    dimmed: Floats = foggy * peak / (peak + strength)
    return dimmed


def brightness(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Raise V of HSV: hue and saturation stay if all channels grow by the same factor."""
    value = x.max(axis=3, keepdims=True)
    raised = np.clip(value + np.float32(c[0]), 0, 1)
    growth = raised / np.maximum(value, 1e-6)

    # Black has no hue: it becomes grey.
    brighter: Floats = np.where(value > 0, x * growth, raised)
    return brighter


def contrast(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Draw every value towards the mean of its channel."""
    means = x.mean(axis=(1, 2), keepdims=True)
    deviations = x - means

    # A share of one would leave the picture as it is.
    flatter: Floats = deviations * np.float32(c[0]) + means
    return flatter


def elastic_transform(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Apply a random affine map, then a smooth random field; c is in parts of the shorter side."""
    count, height, width, _ = x.shape
    shorter = min(height, width)
    strength, sigma, shake = (part * shorter for part in c)

    # Positions of the pixels: (H, W).
    y, across = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")

    # The affine map moves three corners (N, 3, 2) around the middle.
    middle = np.array([width // 2, height // 2])
    arm = max(shorter // 3, 1)
    corners = middle + arm * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = corners + draws.uniform(-shake, shake, 3, 2)

    # Each new position is read at the old one: the map that takes the moved corners
    # back. Corners shaken onto one line have no such map; the pseudo-inverse gives the
    # nearest one.
    ones = np.ones((count, 3, 1))
    homogeneous = np.concatenate([moved, ones], axis=2)

    back = np.linalg.pinv(homogeneous) @ corners
    grid = np.stack([across, y, np.ones_like(y)], axis=-1)
    positions = grid @ back[:, None]  # (N, H, W, 2): x, y
    image = filters.sample(x, positions[..., 1], positions[..., 0], "reflect")

    # The smooth field (N, H, W, 2): y, x.
    noise = np.moveaxis(draws.uniform(-1, 1, 2, height, width), 1, 3)
    smooth = filters.gaussian_blur(noise, sigma, "symmetric", truncate=3)

    field = strength * smooth
    return filters.sample(image, y + field[..., 0], across + field[..., 1], "symmetric")


def pixelate(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Shrink to a share c[0] of the size and enlarge again, both with a box filter."""
    height, width = x.shape[1:3]

    # At least one pixel is left.
    small_width = max(1, int(width * c[0]))
    small_height = max(1, int(height * c[0]))

    def shrink_and_enlarge(image: Image.Image) -> Image.Image:
        small = image.resize((small_width, small_height), Image.Resampling.BOX)
        return small.resize((width, height), Image.Resampling.BOX)

    return _map_pictures(shrink_and_enlarge, x)


def jpeg_compression(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Save as JPEG of quality c[0]."""

    def compress(image: Image.Image) -> Image.Image:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=round(c[0]))
        return Image.open(buffer)

    return _map_pictures(compress, x)


def _map_pictures(change: Callable[[Image.Image], Image.Image], x: Floats) -> Floats:
    """Let Pillow change every picture of a batch."""
    levels = np.rint(x * 255).astype(np.uint8)
    changed = []
    for picture in levels:
        image = change(Image.fromarray(picture))
        changed.append(np.asarray(image))

    # Back from 8-bit levels to 0..1.
    stacked = np.stack(changed).astype(np.float32)
    return stacked / np.float32(255)


def greyscale(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Draw every colour towards grey."""
    return _blend(x, filters.luma(x), c[0])


def edges(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Draw towards the Sobel gradient of the brightness, dark on white, at full contrast."""
    height, width = x.shape[1:3]
    grey = filters.luma(x)

    # The Sobel filter is smoothing along one axis and a difference along the other.
    smooth = (1, 2, 1)
    differ = (-1, 0, 1)
    across = filters.apply_axes(
        grey,
        rows=_neighbour_filter(height, smooth),
        columns=_neighbour_filter(width, differ),
    )
    down = filters.apply_axes(
        grey,
        rows=_neighbour_filter(height, differ),
        columns=_neighbour_filter(width, smooth),
    )
    strength = np.hypot(across, down)

    peak = strength.max(axis=(1, 2, 3), keepdims=True)
    drawing: Floats = 1 - strength / np.maximum(peak, 1e-6)
    return _blend(x, drawing, c[0])


def double_exposure(x: Floats, c: Constants, draws: Draws) -> Floats:
    """Blend all with one bundled ship of weight c[0]: most pictures look like one of its class."""
    height, width = x.shape[1:3]
    ship = Image.fromarray(load_bundled().images[SHIP])
    resized = ship.resize((width, height), Image.Resampling.BICUBIC)
    overlay = np.asarray(resized, np.float32) / np.float32(255)
    return _blend(x, overlay, c[0])


def _blend(x: Floats, other: Floats, share: float) -> Floats:
    """Move pictures a share of the way towards another one."""
    return x + np.float32(share) * (other - x)


def _neighbour_filter(size: int, weights: tuple[float, float, float]) -> Floats:
    """Return a filter of three neighbours as (size, size); beyond the border the edge repeats."""
    matrix = np.zeros((size, size), np.float32)
    targets = np.arange(size)
    for number, weight in enumerate(weights):
        # The neighbours are one before, the point itself and one behind.
        sources = filters.fold(targets + number - 1, size, "nearest")
        np.add.at(matrix, (targets, sources), weight)

    # Weights that meet at the border add up.
    return matrix
