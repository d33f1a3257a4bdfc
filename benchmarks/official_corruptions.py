"""Our corruptions beside the published programs, with the same random numbers where they allow it.

    pip install "numpy<2" scipy==1.11.4 scikit-image==0.20.0 pillow==10.4.0 wand
    pip install imagecorruptions==1.1.2
    pip install --no-deps imagenet-c==0.0.3      # and ImageMagick's library, libmagickwand
    PYTHONPATH=src:. python -m benchmarks.official_corruptions docs/results/corruptions.md

``imagenet-c`` holds the functions that ImageNet-C was made with; those of them that
work on 224 pixels only are replaced by ``imagecorruptions`` (the same for any size) on
32 and 64. Both know the constants of ImageNet-C only, so that ours are called with
these at every size. Their numpy.random is fed from our generator; glass blur gets our
moves. An option of scikit-image that has another name by now is translated. What they
return is clipped and rounded as ours is; the published data cut fractions off instead,
which darkens by half a level.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from cliquetta.data.corruptions import CORRUPTIONS, SEVERITIES
from cliquetta.data.filters import Draws

SIZES = (32, 64, 224)
PICTURES = ("astronaut", "chelsea", "coffee")
ONLY_224 = frozenset({"glass_blur", "fog", "frost", "snow", "pixelate"})
"""Functions of imagenet-c that work on no other size."""
BY_DISTRIBUTION = frozenset({"impulse_noise", "frost"})
"""Where random numbers cannot be given, or other means are used: scikit-image, photographs."""
REMARKS = {
    "shot_noise": "the rest: halves of a grey level (counts of 4.25), rounded up or down",
    "impulse_noise": "distribution; drawn inside scikit-image",
    "glass_blur": "theirs cuts fractions off between its two blurs",
    "motion_blur": "theirs: ImageMagick on 8 bits",
    "snow": "8-bit flakes in theirs; `imagecorruptions` also takes them off-centre",
    "frost": "distribution; photographs in theirs, fractals in ours",
    "brightness": "the rest: halves of a grey level, as above",
    "contrast": "the rest: halves of a grey level, as above",
    "elastic_transform": "OpenCV warps in steps of 1/32 pixel; constants are in pixels of 224",
}
Picture = Any


def pictures(size: int) -> list[Picture]:
    """Three photographs of scikit-image, square."""
    found = []
    for name in PICTURES:
        image = Image.fromarray(getattr(import_module("skimage.data"), name)())
        side = min(image.size)
        left = (image.width - side) // 2
        top = (image.height - side) // 2
        square = image.crop((left, top, left + side, top + side))
        found.append(np.asarray(square.resize((size, size), Image.Resampling.LANCZOS)))
    return found


@contextmanager
def fed(
    generator: np.random.Generator, name: str, reach: int, places: int
) -> Iterator[None]:
    """numpy.random, as their programs call it, from a generator of ours."""
    late: list[Any] = []

    def normal(loc: float = 0.0, scale: float = 1.0, size: Any = None) -> Any:
        return loc + scale * generator.standard_normal(size, np.float32).astype(float)

    def uniform(low: float, high: float, size: Any = None) -> Any:
        if (
            name == "elastic_transform"
            and size is not None
            and len(size) == 2
            and size[1] > 2
        ):
            # Ours draws the vertical field first, theirs the horizontal one.
            late[:] = late or list(
                generator.random((2, *size), np.float32).astype(float)
            )
            return low + (high - low) * late.pop()
        drawn = generator.random(() if size is None else size, np.float32)
        return low + (high - low) * np.float64(drawn)

    moves = (
        iter(generator.integers(-reach, reach, (2, places)).T[:, ::-1])
        if places
        else iter(())
    )
    patches: dict[str, Any] = {
        "normal": normal,
        "uniform": uniform,
        "poisson": lambda rates: generator.poisson(rates),
        "randint": lambda *_, **__: next(moves),
    }
    if name == "frost":
        del patches["randint"]
    with mock.patch.multiple("numpy.random", **patches):
        yield


def theirs(name: str, picture: Picture, severity: int, seed: int) -> Picture:
    """Their function on a picture, as numbers in 0..255."""
    size = len(picture)
    any_size = name == "frost" or (
        name in ONLY_224 and size != 224
    )  # imagenet-c has no photographs
    package = "imagecorruptions" if any_size else "imagenet_c"
    function: Callable[..., Any] = getattr(
        import_module(f"{package}.corruptions"), name
    )
    _, reach, rounds = (*CORRUPTIONS[name].large[severity - 1], 0, 0, 0)[:3]
    places = (
        round(rounds) * (size - 2 * round(reach)) ** 2 if name == "glass_blur" else 0
    )
    gaussian = import_module("skimage.filters").gaussian

    def renamed(
        image: Any, sigma: Any, multichannel: bool = False, **options: Any
    ) -> Any:
        return gaussian(
            image, sigma, channel_axis=-1 if multichannel else None, **options
        )

    feed = fed(np.random.default_rng(seed), name, round(reach), places)
    with feed, mock.patch(f"{package}.corruptions.gaussian", renamed):
        return np.asarray(function(Image.fromarray(picture), severity), dtype=float)


def ours(name: str, picture: Picture, severity: int, seed: int) -> Picture:
    """Ours with the constants of ImageNet-C, whatever the size, in 0..255."""
    draws = Draws([np.random.default_rng(seed)])
    scaled = picture[None].astype(np.float32) / np.float32(255)
    changed = CORRUPTIONS[name].apply(
        scaled, CORRUPTIONS[name].large[severity - 1], draws
    )
    return np.clip(changed[0], 0, 1).astype(float) * 255


def quantile_distance(left: Picture, right: Picture) -> float:
    """Mean difference of two sets of values at equal ranks (Wasserstein), in grey levels."""
    return float(np.abs(np.sort(left.ravel()) - np.sort(right.ravel())).mean())


def compare(name: str, size: int) -> str:
    """One cell of the table."""
    if name == "elastic_transform" and size != 224:
        return "–"
    samples = [(p, s, n) for n, p in enumerate(pictures(size)) for s in SEVERITIES]
    a = [np.rint(ours(name, p, s, n)) for p, s, n in samples]
    b = [np.rint(theirs(name, p, s, n)) for p, s, n in samples]
    if name in BY_DISTRIBUTION:
        again = [np.rint(theirs(name, p, s, n + 100)) for p, s, n in samples]
        between = np.mean([quantile_distance(x, y) for x, y in zip(a, b, strict=True)])
        within = np.mean(
            [quantile_distance(x, y) for x, y in zip(again, b, strict=True)]
        )
        return f"{between:.1f} apart; two of theirs {within:.1f}"
    steps = np.concatenate([np.abs(x - y).ravel() for x, y in zip(a, b, strict=True)])
    if steps.max() == 0:
        return "equal"
    shares = [f"{int(1000 * (steps <= level).mean()) / 10} %" for level in (0, 1, 3)]
    return f"{shares[0]} / {shares[1]} / {shares[2]}"


def main() -> None:
    """Write the page."""
    versions = ", ".join(
        f"{name} {import_module('importlib.metadata').version(name)}"
        for name in (
            "imagenet-c",
            "imagecorruptions",
            "scikit-image",
            "opencv-python",
            "numpy",
        )
    )
    rows = []
    for name in list(CORRUPTIONS)[:15]:  # those of the paper
        cells = [compare(name, size) for size in SIZES]
        rows.append(f"| `{name}` | {' | '.join(cells)} | {REMARKS.get(name, '')} |")
        print(rows[-1], flush=True)
    lines = [
        "# Our corruptions beside the published ones",
        "",
        "Written by `python -m benchmarks.official_corruptions` (its head says what to install):",
        "three photographs, five severities each.",
        f"Versions: {versions}.",
        "",
        "A cell is the share of values that are equal / within one grey level / within three,",
        "rounded down, given the same random numbers; where these cannot be given, how far apart",
        "values of equal rank are (grey levels), and the same for two draws of their program.",
        "",
        "| corruption | 32 px | 64 px | 224 px | remark |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "- 224 px: the functions of ImageNet-C (`imagenet-c`). 32 and 64 px: the same where they",
        "  take other sizes, else those of `imagecorruptions`; always ImageNet-C's constants. The",
        "  program of CIFAR-10-C is not on PyPI: its constants, ours up to 32 px, are not here.",
        "- Values are compared after rounding. The published data cut fractions off instead",
        "  (`numpy.uint8`), which makes them half a grey level darker than ours on average.",
    ]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
