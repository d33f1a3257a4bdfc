"""The 15 corruptions of Hendrycks & Dietterich (ICLR 2019) at 5 severities, and three of our own.

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
_SMALL, _LARGE = 32, 224
_CHUNK = (
    2**22
)  # values worked on at a time: bounds the memory of a batch, whatever its size


@dataclass(frozen=True)
class Corruption:
    """One kind of shift: what it does, and its constants at the five severities."""

    name: str
    group: str  # `noise`, `blur`, `weather`, `digital`, `rendering` or `hub`
    summary: str
    apply: Callable[
        [Floats, Constants, Draws], Floats
    ]  # of pictures in 0..1; may leave these
    small: Table  # constants for pictures of at most 32 pixels (CIFAR-10-C)
    large: Table  # constants for pictures of at least 224 pixels (ImageNet-C)

    def constants(self, severity: int, side: int) -> Constants:
        """The constants for pictures whose shorter side is ``side``."""
        if severity not in SEVERITIES:
            raise UserError(f"severity is {severity!r}: it must be 1, 2, 3, 4 or 5")
        share = math.log(max(side, 1) / _SMALL) / math.log(_LARGE / _SMALL)
        share = min(max(share, 0.0), 1.0)
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
    size = images.shape[1:]
    if images.dtype != np.uint8 or len(size) != 3 or 0 in size or size[2] != 3:
        given = (
            f"{images.dtype} {images.shape}: convert with PIL's image.convert('RGB')"
        )
        raise UserError(
            f"corruptions take 8-bit RGB pictures (uint8, last axis 3), got {given}"
        )
    numbers = range(len(images)) if indices is None else indices
    if len(numbers) != len(images):
        raise UserError(f"{len(images)} pictures but {len(numbers)} indices")
    corruption = look_up("corruption", name, CORRUPTIONS)
    constants = corruption.constants(severity, min(size[:2]))
    out = np.empty_like(images)
    step = max(1, _CHUNK // math.prod(size))
    for start in range(0, len(images), step):
        part = slice(start, start + step)
        draws = Draws([np.random.default_rng((seed, int(i))) for i in numbers[part]])
        scaled = images[part].astype(np.float32) / np.float32(255)
        changed = corruption.apply(scaled, constants, draws)
        out[part] = np.rint(np.clip(changed, 0, 1) * 255).astype(np.uint8)
    return out


_ENTRIES = json.loads(
    (files("cliquetta.data") / "corruptions.json").read_text(encoding="utf-8")
)
# by name, which is that of its function; in the order of the paper, ours last
CORRUPTIONS = {
    name: Corruption(
        name,
        entry["group"],
        entry["summary"],
        getattr(distortions, name),
        *(tuple(map(tuple, entry[size])) for size in ("small", "large")),
    )
    for name, entry in _ENTRIES.items()
}


# --- datasets under a corruption -----------------------------------------------------------------

DEFAULT_SEVERITY = 5
_SHIFT = re.compile(r"(?P<name>[A-Za-z_]+)(?::(?P<severity>\d+))?")


@dataclass(frozen=True)
class Shift:
    """A corruption at one severity."""

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
    shift = _SHIFT.fullmatch(after)
    # A path may hold an @ of its own; after any other id it can only mean a shift.
    is_path = ":" in base and (shift is None or shift["name"] not in CORRUPTIONS)
    if not at or is_path:
        return id, None
    if shift is None:
        raise UserError(f"a shift is written name:severity, got {after!r} in {id!r}")
    return base, Shift(shift["name"], int(shift["severity"] or DEFAULT_SEVERITY))


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
        self.base, self.shift, self.seed = base, shift, seed

    def load(self, index: int) -> Image.Image:
        """Image ``index``, corrupted at its own size."""
        return Image.fromarray(
            self._corrupt(np.asarray(self.base.load(index))[None], [index])[0]
        )

    def arrays(self, indices: Sequence[int]) -> Images | None:
        """Corrupted images (n, H, W, 3) of a base that is in memory."""
        pictures = self.base.arrays(indices)
        return None if pictures is None else self._corrupt(pictures, indices)

    def _corrupt(self, pictures: Images, indices: Sequence[int]) -> Images:
        name, severity = self.shift.name, self.shift.severity
        return corrupt_batch(pictures, name, severity, self.seed, indices=indices)

    def redrawn(self, round: int) -> "ShiftedDataset":
        """A copy with noise of its own for another round."""
        return (
            ShiftedDataset(self.base, self.shift, seed=self.seed + round)
            if round
            else self
        )

    def contents(self) -> str:
        """Contents of the base, and the shift."""
        return f"{self.base.contents()}@{self.shift}/{self.seed}"

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the list of images and of what is done to them."""
        text = f"{self.base.fingerprint}@{self.shift}/{self.seed}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
