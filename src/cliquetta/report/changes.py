"""Differences between a method's predictions and those of zero-shot on the same images.

Counted, in words, and as the confusion of the classes whose predictions changed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cliquetta.errors import UserError
from cliquetta.evaluation.predictions import Predictions, paired_test
from cliquetta.report.markup import count, number
from cliquetta.report.style import DIVERGING, FAINT, INK, Figure, new_figure
from cliquetta.significance import PairedTest

CLASSES = 12  # classes that are drawn in a confusion matrix

Pair = tuple[
    Predictions, Predictions
]  # predictions of zero-shot and of a method over one stream


@dataclass(frozen=True)
class Changes:
    """Counts over streams."""

    images: int  # in all streams: a picture under two shifts counts twice
    labelled: int
    changed: int  # images whose first prediction differs
    test: PairedTest | None  # ``None`` without labels

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
    images = 0
    labelled = 0
    changed = 0
    for plain, adapted in pairs:
        _same(plain, adapted)
        images += len(plain)
        labelled += int((plain.labels >= 0).sum())
        differs = plain.classes[:, 0] != adapted.classes[:, 0]
        changed += int(differs.sum())
    return Changes(
        images=images,
        labelled=labelled,
        changed=changed,
        test=paired_test(pairs) if labelled else None,
    )


def in_words(changes: Changes, label: str) -> str:
    """Describe what a method did to the predictions, good or bad."""
    if not changes.changed:
        return f"{label} changed none of {count(changes.images, 'prediction')}."
    text = (
        f"{label} changed {changes.changed:,} of {count(changes.images, 'prediction')}"
    )
    test = changes.test
    if test is None or changes.gain is None:
        return text + "; without labels nobody can say which are right."

    # The rest moved from one wrong class to another, or has no label.
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
        return (
            f"{text}, too small to tell from chance on these images (p = {test.p:.2g})."
        )
    return f"{text} (p = {test.p:.2g})."


def moves(plain: Predictions, adapted: Predictions) -> list[Move]:
    """Count all moves between two classes, the most frequent first."""
    _same(plain, adapted)
    before = plain.classes[:, 0]
    after = adapted.classes[:, 0]
    images = np.stack([before, after, plain.labels], axis=1)
    changed = images[before != after].tolist()

    # Repaired is what moved to its label, broken what moved away from it.
    with_label = Counter(map(tuple, changed))
    pairs = Counter((old, new) for old, new, _ in changed)

    found = []
    for old, new in sorted(pairs, key=lambda pair: (-pairs[pair], pair)):
        move = Move(
            before=old,
            after=new,
            count=pairs[old, new],
            repaired=with_label[old, new, new],
            broken=with_label[old, new, old],
        )
        found.append(move)
    return found


def net_gain(plain: Predictions, adapted: Predictions) -> npt.NDArray[np.int64]:
    """Count predictions gained over ``plain`` up to each image of the stream, (n,)."""
    _same(plain, adapted)
    gained = adapted.correct.astype(np.int64) - plain.correct.astype(np.int64)
    return np.cumsum(gained)


def _same(plain: Predictions, adapted: Predictions) -> None:
    if plain.keys != adapted.keys:
        raise UserError("the runs did not see the same images in the same order")


@dataclass(frozen=True, eq=False)
class ChangedConfusion:
    """Images by label (row) and prediction (column), before and after; the last is all else."""

    classes: tuple[int, ...]
    before: npt.NDArray[np.int64]  # (C + 1, C + 1)
    after: npt.NDArray[np.int64]

    @property
    def difference(self) -> npt.NDArray[np.int64]:
        """Predictions that a cell gained."""
        return self.after - self.before


def changed_confusion(
    plain: Predictions, adapted: Predictions, limit: int = CLASSES
) -> ChangedConfusion:
    """Count confusions over the classes that most predictions moved between, by class."""
    # A class counts by the images that changed: their labels and both predictions.
    labelled = plain.labels >= 0
    changed = plain.classes[:, 0] != adapted.classes[:, 0]
    weight = Counter(plain.labels[changed & labelled].tolist())
    for move in moves(plain, adapted):
        weight.update({move.before: move.count, move.after: move.count})
    busiest = sorted(weight, key=lambda label: (-weight[label], label))
    classes = tuple(sorted(busiest[:limit]))

    labels = plain.labels[labelled]
    before = _confusion(labels, plain.classes[labelled, 0], classes)
    after = _confusion(labels, adapted.classes[labelled, 0], classes)
    return ChangedConfusion(classes=classes, before=before, after=after)


def _confusion(
    labels: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    classes: tuple[int, ...],
) -> npt.NDArray[np.int64]:
    """Count images by label and prediction, (C + 1, C + 1); other classes share the last index."""
    index = {label: number for number, label in enumerate(classes)}
    others = len(classes)
    counts = np.zeros((others + 1, others + 1), np.int64)
    for label, prediction in zip(labels.tolist(), predicted.tolist(), strict=True):
        row = index.get(label, others)
        column = index.get(prediction, others)
        counts[row, column] += 1
    return counts


def confusion_figure(confusion: ChangedConfusion, names: tuple[str, ...]) -> Figure:
    """Draw cells that gained predictions and cells that lost some, with their numbers."""
    from matplotlib.patches import Rectangle

    labels = [*(names[label] for label in confusion.classes), "other"]
    size = len(confusion.classes)
    # The row and column of all other classes are drawn only where something happened.
    rows = size + int(confusion.difference[-1].any())
    columns = size + int(confusion.difference[:, -1].any())

    cells = confusion.difference[:rows, :columns]
    # Half of the colours stay unused, so that numbers on dark cells can be read.
    most = max(1, int(np.abs(cells).max(initial=0)))
    with new_figure(2.0 + 0.46 * columns, 1.5 + 0.36 * rows) as figure:
        axes = figure.subplots()
        axes.grid(False)
        axes.imshow(cells, cmap=DIVERGING, vmin=-2 * most, vmax=2 * most, aspect="auto")
        for row, column in np.argwhere(cells):
            text = f"{cells[row, column]:+d}".replace("-", "−")
            axes.text(column, row, text, ha="center", va="center", color="#101418")

        # The diagonal, where predictions are correct, is framed.
        for corner in np.arange(size) - 0.5:
            frame = Rectangle(
                (corner, corner), 1, 1, fill=False, edgecolor=FAINT, linewidth=1.1
            )
            axes.add_patch(frame)

        axes.set_xticks(range(columns), labels[:columns], rotation=40, ha="right")
        axes.set_yticks(range(rows), labels[:rows])
        axes.set(xlabel="prediction", ylabel="label")
        axes.spines[:].set(visible=True, color=INK, linewidth=0.6)
    return figure
