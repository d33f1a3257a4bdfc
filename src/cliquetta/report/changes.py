"""Differences between a method's predictions and those of zero-shot on the same images."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cliquetta.errors import UserError
from cliquetta.evaluation.predictions import PairedTest, Predictions, paired_test
from cliquetta.report.markup import count, number

Pair = tuple[Predictions, Predictions]  # predictions of zero-shot and of a method over one stream


@dataclass(frozen=True)
class Changes:
    """Counts over streams; ``test`` is ``None`` without labels."""

    images: int  # in all streams: a picture under two shifts counts twice
    labelled: int
    changed: int  # images whose first prediction differs
    test: PairedTest | None

    @property
    def gain(self) -> float | None:
        """Difference of accuracy in points."""
        if self.test is None:
            return None
        return 100 * (self.test.repaired - self.test.broken) / self.labelled


@dataclass(frozen=True)
class Move:
    """Predictions that went from one class to another."""

    before: int
    after: int
    count: int
    repaired: int
    broken: int


def count_changes(pairs: Sequence[Pair]) -> Changes:
    """Count the changes between the runs of all ``(plain, adapted)`` pairs together.

    To the test a key that is in several pairs is one picture, seen several times.
    """
    images = labelled = changed = 0
    for plain, adapted in pairs:
        _same(plain, adapted)
        images += len(plain)
        labelled += int((plain.labels >= 0).sum())
        changed += int((plain.classes[:, 0] != adapted.classes[:, 0]).sum())
    return Changes(images, labelled, changed, paired_test(pairs) if labelled else None)


def in_words(changes: Changes, label: str) -> str:
    """Describe what a method did to the predictions, good or bad."""
    if not changes.changed:
        return f"{label} changed none of {count(changes.images, 'prediction')}."
    text = f"{label} changed {changes.changed:,} of {count(changes.images, 'prediction')}"
    test = changes.test
    if test is None or changes.gain is None:
        return text + "; without labels nobody can say which are right."
    sideways = changes.changed - test.repaired - test.broken
    text += (
        f": {test.repaired:,} from wrong to right, {test.broken:,} from right to wrong, "
        f"{sideways:,} otherwise."
    )
    if test.repaired == test.broken:
        return text + " In sum nothing is gained or lost."
    verdict = "gain" if changes.gain > 0 else "loss"
    text += f" That is a {verdict} of {number(abs(changes.gain))} points"
    if test.p >= 0.05:
        return f"{text}, too small to tell from chance on these images (p = {test.p:.2g})."
    return f"{text} (p = {test.p:.2g})."


def moves(plain: Predictions, adapted: Predictions) -> list[Move]:
    """All moves between two classes, the most frequent first."""
    _same(plain, adapted)
    before, after = plain.classes[:, 0], adapted.classes[:, 0]
    differs = before != after
    changed = np.stack([before, after, plain.labels], axis=1)[differs].tolist()
    triples = Counter(map(tuple, changed))
    pairs = Counter((old, new) for old, new, _ in changed)
    return [
        Move(old, new, number, triples[old, new, new], triples[old, new, old])
        for (old, new), number in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    ]


def net_gain(plain: Predictions, adapted: Predictions) -> npt.NDArray[np.int64]:
    """Predictions gained over ``plain`` up to each image of the stream, (n,)."""
    _same(plain, adapted)
    return np.cumsum(adapted.correct.astype(np.int64) - plain.correct.astype(np.int64))


def _same(plain: Predictions, adapted: Predictions) -> None:
    if plain.keys != adapted.keys:
        raise UserError("the runs did not see the same images in the same order")
