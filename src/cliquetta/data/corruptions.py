"""Corruptions: the 15 of Hendrycks & Dietterich (ICLR 2019) at 5 severities, and three of our own.

Constants are those of CIFAR-10-C up to a shorter side of 32, of ImageNet-C from 224 on,
and between them a straight line in the logarithm of the side. Departures from the
published programs: results are rounded (theirs are cut off, half a level darker); frost
is drawn, not photographed; every picture has a stream of random numbers of its own. Of
our own, severity 5 goes all the way.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

import numpy as np
from PIL import Image

from cliquetta.data import distortions
from cliquetta.data.dataset import Dataset
from cliquetta.data.dataset import UInt8Array as Images
from cliquetta.data.distortions import Constants
from cliquetta.data.filters import Draws, Floats
from cliquetta.errors import UserError, look_up

Table = tuple[Constants, ...]  # by severity

SEVERITIES = (1, 2, 3, 4, 5)
# Shorter sides of CIFAR-10-C and ImageNet-C.
_SMALL = 32
_LARGE = 224
# Values worked on at a time: bounds the memory of a batch, whatever its size.
_CHUNK = 2**22


@dataclass(frozen=True)
class Corruption:
    """Kind of shift: what it does, and its constants at the five severities."""

    name: str
    # `noise`, `blur`, `weather`, `digital`, `rendering` or `hub`.
    group: str
    summary: str
    # Change pictures in 0..1; the result may leave these.
    apply: Callable[[Floats, Constants, Draws], Floats]
    # Constants for pictures of at most 32 pixels (CIFAR-10-C).
    small: Table
    # Constants for pictures of at least 224 pixels (ImageNet-C).
    large: Table

    def constants(self, severity: int, side: int) -> Constants:
        """Return the constants for pictures whose shorter side is ``side``."""
        if severity not in SEVERITIES:
            raise UserError(f"severity is {severity!r}: it must be 1, 2, 3, 4 or 5")

        # Where the side lies between both sizes, on a logarithmic scale.
        share = math.log(max(side, 1) / _SMALL) / math.log(_LARGE / _SMALL)

        # Beyond both sizes the constants stay.
        share = min(max(share, 0.0), 1.0)

        # A straight line between both tables.
        pairs = zip(self.small[severity - 1], self.large[severity - 1], strict=True)
        return tuple((1 - share) * small + share * large for small, large in pairs)


def corrupt_batch(
    images: Images,
    name: str,
    severity: int,
    seed: int,
    indices: Sequence[int] | None = None,
) -> Images:
    """Corrupt a batch (N, H, W, 3) of any size; the picture with index i draws from ``(seed, i)``.

    Any subset in any order gives the same pictures; ``indices`` are 0, 1, ... unless
    given.
    """
    _check_pictures(images)
    numbers = range(len(images)) if indices is None else indices
    if len(numbers) != len(images):
        raise UserError(f"{len(images)} pictures but {len(numbers)} indices")

    # Constants depend on the size, which all pictures share.
    corruption = look_up("corruption", name, CORRUPTIONS)
    size = images.shape[1:]
    constants = corruption.constants(severity, min(size[:2]))
    out = np.empty_like(images)

    step = max(1, _CHUNK // math.prod(size))
    for start in range(0, len(images), step):
        part = slice(start, start + step)

        # Every picture draws from its own generator.
        generators = [np.random.default_rng((seed, int(i))) for i in numbers[part]]
        scaled = images[part].astype(np.float32) / np.float32(255)
        changed = corruption.apply(scaled, constants, Draws(generators))

        # Back to 8 bits, rounded.
        levels = np.rint(np.clip(changed, 0, 1) * 255)
        out[part] = levels.astype(np.uint8)
    return out


def _check_pictures(images: Images) -> None:
    """Refuse an array that does not hold 8-bit RGB pictures."""
    size = images.shape[1:]
    if images.dtype == np.uint8 and len(size) == 3 and size[2] == 3 and 0 not in size:
        return
    raise UserError(
        "corruptions take 8-bit RGB pictures (uint8, last axis 3), got "
        f"{images.dtype} {images.shape}: convert with PIL's image.convert('RGB')"
    )


def _read_corruptions() -> dict[str, Corruption]:
    """Read the table of corruptions and find the function of each by its name."""
    path = files("cliquetta.data") / "corruptions.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    corruptions = {}
    for name, entry in entries.items():
        corruptions[name] = Corruption(
            name=name,
            group=entry["group"],
            summary=entry["summary"],
            apply=getattr(distortions, name),
            small=tuple(map(tuple, entry["small"])),
            large=tuple(map(tuple, entry["large"])),
        )
    return corruptions


# In the order of the paper, ours last.
CORRUPTIONS = _read_corruptions()


# --- datasets under a corruption -----------------------------------------------------------------

DEFAULT_SEVERITY = 5
_SHIFT = re.compile(r"(?P<name>[A-Za-z_]+)(?::(?P<severity>\d+))?")


@dataclass(frozen=True)
class Shift:
    """Corruption at one severity."""

    name: str
    severity: int = DEFAULT_SEVERITY

    def __post_init__(self) -> None:
        """Validate fields."""
        look_up("shift", self.name, CORRUPTIONS)
        if self.severity not in SEVERITIES:
            raise UserError(f"severity of {self.name} is 1 to 5, got {self.severity}")

    def __str__(self) -> str:
        return f"{self.name}:{self.severity}"


def parse_dataset_id(id: str) -> tuple[str, Shift | None]:
    """Split an id into the dataset and its shift; without ``:n`` the severity is 5.

    >>> parse_dataset_id("bundled@fog:3")
    ('bundled', Shift(name='fog', severity=3))
    >>> parse_dataset_id("bundled")
    ('bundled', None)
    """
    base, at, after = id.rpartition("@")
    if not at:
        return id, None
    shift = _SHIFT.fullmatch(after)

    # A path may hold an @ of its own; after any other id it can only mean a shift.
    names_shift = shift is not None and shift["name"] in CORRUPTIONS
    if ":" in base and not names_shift:
        return id, None
    if shift is None:
        raise UserError(f"a shift is written name:severity, got {after!r} in {id!r}")
    severity = int(shift["severity"] or DEFAULT_SEVERITY)
    return base, Shift(shift["name"], severity)


class ShiftedDataset(Dataset):
    """``base`` with every image corrupted; image i draws its noise from ``(seed, i)``."""

    def __init__(self, base: Dataset, shift: Shift, *, seed: int = 0) -> None:
        if base.features([0]) is not None:
            raise UserError(
                f"{base.id} holds features, and {shift} needs images: leave it out"
            )
        super().__init__(
            f"{base.id}@{shift}",
            names=base.names,
            keys=base.keys,
            labels=base.labels,
            templates=base.templates,
        )
        self.base = base
        self.shift = shift
        self.seed = seed

    def load(self, index: int) -> Image.Image:
        """Load image ``index``, corrupted at its own size."""
        picture = np.asarray(self.base.load(index))
        (corrupted,) = self._corrupt(picture[None], [index])
        return Image.fromarray(corrupted)

    def arrays(self, indices: Sequence[int]) -> Images | None:
        """Return corrupted images (n, H, W, 3) of a base that is in memory."""
        pictures = self.base.arrays(indices)
        return None if pictures is None else self._corrupt(pictures, indices)

    def _corrupt(self, pictures: Images, indices: Sequence[int]) -> Images:
        """Corrupt pictures of the base."""
        return corrupt_batch(
            pictures,
            self.shift.name,
            severity=self.shift.severity,
            seed=self.seed,
            indices=indices,
        )

    def redrawn(self, round: int) -> "ShiftedDataset":
        """Return a copy with other noise for another round."""
        if round == 0:
            return self
        return ShiftedDataset(self.base, self.shift, seed=self.seed + round)

    def contents(self) -> str:
        """Describe the contents of the base, and the shift."""
        return f"{self.base.contents()}@{self.shift}/{self.seed}"

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the list of images and of what is done to them."""
        text = f"{self.base.fingerprint}@{self.shift}/{self.seed}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
