"""What the web app keeps of the batches it has run: answers, the last batch, the score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cliquetta.app.evidence import Count
from cliquetta.serve.decoding import Refused
from cliquetta.types import Prediction


@dataclass(frozen=True)
class Row:
    """One image: what plain CLIP and what the method answered, and the truth where it is known."""

    batch: int
    name: str
    before: str
    before_probability: float
    after: str
    after_probability: float
    truth: str | None = None

    @property
    def changed(self) -> bool:
        """Whether the method answers otherwise than plain CLIP."""
        return self.before != self.after


@dataclass(frozen=True)
class Shown:
    """One batch and everything that can be told about it."""

    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]
    pixels: Tensor
    """(B, 3, S, S) as the model saw them."""
    pictures: npt.NDArray[np.uint8]
    """The same as pictures, (B, S, S, 3)."""
    prediction: Prediction


@dataclass
class Tally:
    """Right answers so far, and the same after every batch."""

    images: int = 0
    labelled: int = 0
    changed: int = 0
    right: dict[str, int] = field(default_factory=lambda: {"before": 0, "after": 0})
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Labelled images so far, and the share that plain CLIP and the method got right."""
    counts: list[Mapping[str, Count]] = field(default_factory=list)
    """What the method's cache held after every batch."""

    def add(self, rows: Sequence[Row], counts: Mapping[str, Count]) -> None:
        """Count one batch."""
        known = [row for row in rows if row.truth is not None]
        self.images += len(rows)
        self.labelled += len(known)
        self.changed += sum(row.changed for row in rows)
        self.right["before"] += sum(row.before == row.truth for row in known)
        self.right["after"] += sum(row.after == row.truth for row in known)
        if known:
            before, after = (self.right[side] / self.labelled for side in ("before", "after"))
            self.curve.append((self.labelled, before, after))
        self.counts.append(counts)
