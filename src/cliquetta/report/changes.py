"""How the answers of a method differ from those of zero-shot on the same images."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cliquetta.evaluation.paired import PairedTest, paired_test
from cliquetta.evaluation.predictions import Predictions


@dataclass(frozen=True)
class Changes:
    """Counts over one stream; ``test`` is ``None`` without labels."""

    images: int
    changed: int
    """Images whose first answer differs."""
    test: PairedTest | None

    @property
    def gain(self) -> float | None:
        """Difference of accuracy in points."""
        if self.test is None:
            return None
        return 100 * (self.test.repaired - self.test.broken) / self.test.images


@dataclass(frozen=True)
class Move:
    """Answers that went from one class to another."""

    before: int
    after: int
    count: int
    repaired: int
    broken: int


def count_changes(plain: Predictions, adapted: Predictions) -> Changes:
    """What changed from ``plain`` to ``adapted``, two runs over one stream."""
    _same(plain, adapted)
    changed = int((plain.classes[:, 0] != adapted.classes[:, 0]).sum())
    labelled = bool((plain.labels >= 0).any())
    return Changes(len(plain), changed, paired_test([(plain, adapted)]) if labelled else None)


def moves(plain: Predictions, adapted: Predictions) -> list[Move]:
    """All moves between two classes, the most frequent first."""
    _same(plain, adapted)
    before, after = plain.classes[:, 0], adapted.classes[:, 0]
    differs = before != after
    pairs = list(zip(before[differs].tolist(), after[differs].tolist(), strict=True))
    labels = plain.labels[differs].tolist()
    count = Counter(pairs)
    repaired = Counter(p for p, label in zip(pairs, labels, strict=True) if p[1] == label)
    broken = Counter(p for p, label in zip(pairs, labels, strict=True) if p[0] == label)
    return [
        Move(*pair, number, repaired[pair], broken[pair])
        for pair, number in sorted(count.items(), key=lambda item: (-item[1], item[0]))
    ]


def net_gain(plain: Predictions, adapted: Predictions) -> npt.NDArray[np.int64]:
    """Answers gained over ``plain`` up to each image of the stream, (n,)."""
    _same(plain, adapted)
    steps = adapted.correct.astype(np.int64) - plain.correct.astype(np.int64)
    total: npt.NDArray[np.int64] = steps.cumsum()
    return total


def _same(plain: Predictions, adapted: Predictions) -> None:
    if plain.keys != adapted.keys:
        raise ValueError("the runs did not see the same images in the same order")
