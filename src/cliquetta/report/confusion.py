"""Gains and losses by class: the confusion of the classes whose predictions changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cliquetta.evaluation.predictions import Predictions
from cliquetta.report.changes import moves
from cliquetta.report.style import DIVERGING, FAINT, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = 12  # classes that are drawn


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
    """Confusions over the classes that most predictions moved between, by class."""
    known = plain.labels >= 0
    changed = plain.classes[:, 0] != adapted.classes[:, 0]
    weight = Counter(plain.labels[changed & known].tolist())
    for move in moves(plain, adapted):
        weight.update({move.before: move.count, move.after: move.count})
    busiest = sorted(weight, key=lambda label: (-weight[label], label))[:limit]
    classes = tuple(sorted(busiest))
    before, after = (
        _confusion(plain.labels[known], some.classes[known, 0], classes)
        for some in (plain, adapted)
    )
    return ChangedConfusion(classes, before, after)


def _confusion(
    labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], classes: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Images by label and prediction, (C + 1, C + 1); all other classes share the last index."""
    index = {label: number for number, label in enumerate(classes)}
    counts = np.zeros((len(classes) + 1, len(classes) + 1), np.int64)
    for pair in zip(labels.tolist(), predicted.tolist(), strict=True):
        counts[tuple(index.get(label, len(classes)) for label in pair)] += 1
    return counts


def confusion_figure(confusion: ChangedConfusion, names: tuple[str, ...]) -> Figure:
    """Cells that gained predictions and cells that lost some, with their numbers."""
    from matplotlib.patches import Rectangle

    shown = [names[label] for label in confusion.classes]
    size = len(shown)
    # The row and column of all other classes are drawn only where something happened.
    rows = size + int(confusion.difference[-1].any())
    columns = size + int(confusion.difference[:, -1].any())
    cells = confusion.difference[:rows, :columns]
    most = max(1, int(np.abs(cells).max(initial=0)))
    with new_figure(2.0 + 0.46 * columns, 1.5 + 0.36 * rows) as figure:
        axes = figure.subplots()
        axes.grid(False)
        axes.imshow(cells, cmap=DIVERGING, vmin=-2 * most, vmax=2 * most, aspect="auto")
        for row, column in zip(*cells.nonzero(), strict=True):
            text = f"{cells[row, column]:+d}".replace("-", "−")
            axes.text(column, row, text, ha="center", va="center", color="#101418")
        for corner in np.arange(size) - 0.5:  # of the diagonal: correct predictions
            frame = Rectangle((corner, corner), 1, 1, fill=False, edgecolor=FAINT, linewidth=1.1)
            axes.add_patch(frame)
        axes.set_xticks(range(columns), [*shown, "other"][:columns], rotation=40, ha="right")
        axes.set_yticks(range(rows), [*shown, "other"][:rows])
        axes.set(xlabel="prediction", ylabel="label")
        axes.spines[:].set(visible=True, color=INK, linewidth=0.6)
    return figure
