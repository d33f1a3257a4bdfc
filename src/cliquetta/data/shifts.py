"""A dataset under a shift, written after its id: ``bundled@gaussian_noise:3``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image

from cliquetta.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt_batch
from cliquetta.data.dataset import Dataset, UInt8Array
from cliquetta.errors import UserError, look_up

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
            raise UserError(f"{base.id} holds features, and {shift} needs images: leave it out")
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
        """Image ``index``, corrupted at its own size."""
        return Image.fromarray(self._corrupt(np.asarray(self.base.load(index))[None], [index])[0])

    def arrays(self, indices: Sequence[int]) -> UInt8Array | None:
        """Corrupted images (n, H, W, 3) of a base that is in memory."""
        pictures = self.base.arrays(indices)
        return None if pictures is None else self._corrupt(pictures, indices)

    def _corrupt(self, pictures: UInt8Array, indices: Sequence[int]) -> UInt8Array:
        name, severity = self.shift.name, self.shift.severity
        return corrupt_batch(pictures, name, severity, self.seed, indices=indices)

    def redrawn(self, round: int) -> ShiftedDataset:
        """A copy with noise of its own for another round."""
        return ShiftedDataset(self.base, self.shift, seed=self.seed + round) if round else self

    def contents(self) -> str:
        """Contents of the base, and the shift."""
        return f"{self.base.contents()}@{self.shift}/{self.seed}"

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the list of images and of what is done to them."""
        text = f"{self.base.fingerprint}@{self.shift}/{self.seed}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
