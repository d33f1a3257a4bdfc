"""Shifts of pictures: the 15 standard corruptions at 5 severities, greyscale and edges.

Definitions and constants are those of Hendrycks & Dietterich, "Benchmarking Neural Network
Robustness to Common Corruptions and Perturbations" (ICLR 2019): the ones of CIFAR-10-C for
pictures whose shorter side is at most 32, the ones of ImageNet-C from 224 on, and in between a
straight line in the logarithm of the side. The code is ours and needs numpy and Pillow only; it
departs from the published programs in three places:

- results are rounded to whole grey levels (theirs cut off, which darkens by half a level);
- frost is drawn by a program of ours: the published one lays photographs of frost over pictures;
- random numbers come from a stream per picture, so that order and batch size do not matter.

``greyscale`` and ``edges`` are not of that paper: severity says how far they go (5 is all the way).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cliquetta.data import distortions as kinds
from cliquetta.data.distortions import Constants
from cliquetta.data.filters import Draws, Floats
from cliquetta.errors import UnknownNameError, UserError

Images = NDArray[np.uint8]
Table = tuple[Constants, Constants, Constants, Constants, Constants]

SEVERITIES = (1, 2, 3, 4, 5)
_SMALL, _LARGE = 32, 224
_CHUNK = 2**22
"""Values worked on at a time: bounds the memory of a batch, whatever its size."""


@dataclass(frozen=True)
class Corruption:
    """One kind of shift: what it does, and its constants at the five severities."""

    name: str
    group: str
    """``noise``, ``blur``, ``weather``, ``digital`` or ``rendering``."""
    summary: str
    apply: Callable[[Floats, Constants, Draws], Floats]
    """Pictures in 0..1 (N, H, W, 3), constants, random numbers -> pictures, not yet clipped."""
    small: Table
    """Constants for pictures of at most 32 pixels (CIFAR-10-C)."""
    large: Table
    """Constants for pictures of at least 224 pixels (ImageNet-C)."""

    def constants(self, severity: int, side: int) -> Constants:
        """The constants for pictures whose shorter side is ``side``."""
        if severity not in SEVERITIES:
            raise UserError(f"severity is {severity!r}: it must be 1, 2, 3, 4 or 5")
        share = math.log(max(side, 1) / _SMALL) / math.log(_LARGE / _SMALL)
        share = min(max(share, 0.0), 1.0)
        pairs = zip(self.small[severity - 1], self.large[severity - 1], strict=True)
        return tuple((1 - share) * small + share * large for small, large in pairs)


def corrupt(image: Images, name: str, severity: int, generator: np.random.Generator) -> Images:
    """Corrupt one RGB picture (H, W, 3) of any size; the input is left alone."""
    if image.ndim != 3:
        raise UserError(f"corrupt takes one picture (H, W, 3), got shape {image.shape}")
    out: Images = _corrupt(image[None], _find(name), severity, [generator])[0]
    return out


def corrupt_batch(
    images: Images, name: str, severity: int, seed: int, indices: Sequence[int] | None = None
) -> Images:
    """Corrupt a batch (N, H, W, 3); the picture with index i draws from ``(seed, i)``.

    ``indices`` are the places of the pictures in their dataset (0, 1, ... unless given): with
    them, any subset in any order gives the same pictures as the whole set. Picture i equals
    ``corrupt(image, name, severity, numpy.random.default_rng((seed, i)))``.
    """
    numbers = range(len(images)) if indices is None else indices
    if len(numbers) != len(images):
        raise UserError(f"{len(images)} pictures but {len(numbers)} indices")
    corruption = _find(name)
    corruption.constants(severity, 1)
    out = np.empty_like(images)
    size = max(1, _CHUNK // max(1, math.prod(images.shape[1:])))
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        generators = [np.random.default_rng((seed, int(i))) for i in numbers[part]]
        out[part] = _corrupt(images[part], corruption, severity, generators)
    return out


def _find(name: str) -> Corruption:
    if name not in CORRUPTIONS:
        raise UnknownNameError("corruption", name, CORRUPTIONS)
    return CORRUPTIONS[name]


def _corrupt(
    images: Images,
    corruption: Corruption,
    severity: int,
    generators: Sequence[np.random.Generator],
) -> Images:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape:
        raise UserError(
            f"corruptions take 8-bit RGB pictures (uint8, last axis 3), got {images.dtype} "
            f"{images.shape}: convert with PIL's image.convert('RGB')"
        )
    constants = corruption.constants(severity, min(images.shape[1:3]))
    scaled = images.astype(np.float32) / np.float32(255)
    changed = corruption.apply(scaled, constants, Draws(generators))
    return np.rint(np.clip(changed, 0, 1) * 255).astype(np.uint8)


def _one(*values: float) -> Table:
    """A table with one constant per severity."""
    a, b, c, d, e = values
    return (a,), (b,), (c,), (d,), (e,)


_FAR = _one(0.2, 0.4, 0.6, 0.8, 1.0)

_ALL = (
    Corruption(
        "gaussian_noise",
        "noise",
        "normal noise on every value",
        kinds.gaussian_noise,
        small=_one(0.04, 0.06, 0.08, 0.09, 0.10),
        large=_one(0.08, 0.12, 0.18, 0.26, 0.38),
    ),
    Corruption(
        "shot_noise",
        "noise",
        "photon counting noise of low light",
        kinds.shot_noise,
        small=_one(500, 250, 100, 75, 50),
        large=_one(60, 25, 12, 5, 3),
    ),
    Corruption(
        "impulse_noise",
        "noise",
        "salt and pepper",
        kinds.impulse_noise,
        small=_one(0.01, 0.02, 0.03, 0.05, 0.07),
        large=_one(0.03, 0.06, 0.09, 0.17, 0.27),
    ),
    Corruption(
        "defocus_blur",
        "blur",
        "a lens out of focus: radius of the disk, softness of its edge",
        kinds.defocus_blur,
        small=((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        large=((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    ),
    Corruption(
        "glass_blur",
        "blur",
        "frosted glass: blur, reach of the swaps, rounds",
        kinds.glass_blur,
        small=((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        large=((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    ),
    Corruption(
        "motion_blur",
        "blur",
        "a camera that moves: radius, sigma",
        kinds.motion_blur,
        small=((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        large=((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    ),
    Corruption(
        "zoom_blur",
        "blur",
        "a camera that moves towards the scene: end and step of the factors",
        kinds.zoom_blur,
        small=((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        large=((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    ),
    Corruption(
        "snow",
        "weather",
        "falling snow: mean, spread, size and threshold of the flakes, smear (2), colour kept",
        kinds.snow,
        small=(
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        large=(
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    Corruption(
        "frost",
        "weather",
        "ice on the lens: share of the picture, share of the ice",
        kinds.frost,
        small=((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        large=((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    ),
    Corruption(
        "fog",
        "weather",
        "clouds of fog: strength, decay of the fractal",
        kinds.fog,
        small=((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        large=((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    ),
    Corruption(
        "brightness",
        "weather",
        "more light: added to V of HSV",
        kinds.brightness,
        small=_one(0.05, 0.1, 0.15, 0.2, 0.3),
        large=_one(0.1, 0.2, 0.3, 0.4, 0.5),
    ),
    Corruption(
        "contrast",
        "digital",
        "less contrast: share kept",
        kinds.contrast,
        small=_one(0.75, 0.5, 0.4, 0.3, 0.15),
        large=_one(0.4, 0.3, 0.2, 0.1, 0.05),
    ),
    Corruption(
        "elastic_transform",
        "digital",
        "stretched regions: strength and smoothness of the field, shake of the affine map",
        kinds.elastic_transform,
        small=(
            (0, 0, 0.08),
            (0.05, 0.2, 0.07),
            (0.08, 0.06, 0.06),
            (0.1, 0.04, 0.05),
            (0.1, 0.03, 0.03),
        ),
        large=(
            (2, 0.7, 0.1),
            (2, 0.08, 0.2),
            (0.05, 0.01, 0.02),
            (0.07, 0.01, 0.02),
            (0.12, 0.01, 0.02),
        ),
    ),
    Corruption(
        "pixelate",
        "digital",
        "lower resolution: share kept",
        kinds.pixelate,
        small=_one(0.95, 0.9, 0.85, 0.75, 0.65),
        large=_one(0.6, 0.5, 0.4, 0.3, 0.25),
    ),
    Corruption(
        "jpeg_compression",
        "digital",
        "JPEG artefacts: quality",
        kinds.jpeg_compression,
        small=_one(80, 65, 58, 50, 40),
        large=_one(25, 18, 15, 10, 7),
    ),
    Corruption(
        "greyscale", "rendering", "colour taken away", kinds.greyscale, small=_FAR, large=_FAR
    ),
    Corruption("edges", "rendering", "a drawing of the edges", kinds.edges, small=_FAR, large=_FAR),
)

CORRUPTIONS: dict[str, Corruption] = {corruption.name: corruption for corruption in _ALL}
"""Every corruption by name, in the order of the paper; ``greyscale`` and ``edges`` last."""

STANDARD: tuple[str, ...] = tuple(c.name for c in _ALL if c.group != "rendering")
"""The 15 of the paper."""
