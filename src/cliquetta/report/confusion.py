"""Gains and losses by class: the confusion of the classes whose predictions changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cliquetta.evaluation.predictions import Predictions
from cliquetta.report.changes import moves
from cliquetta.report.style import DIVERGING, FAINT, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = 12
"""Classes that are drawn."""


@dataclass(frozen=True, eq=False)
class ChangedConfusion:
    """Answers by label (rows) and answer (columns), before and after; last is everything else."""

    classes: tuple[int, ...]
    before: npt.NDArray[np.int64]
    """(C + 1, C + 1)."""
    after: npt.NDArray[np.int64]

    @property
    def difference(self) -> npt.NDArray[np.int64]:
        """Answers that a cell gained."""
        return self.after - self.before


def changed_confusion(
    plain: Predictions, adapted: Predictions, limit: int = CLASSES
) -> ChangedConfusion:
    """Confusions over the classes that most answers moved between, by class."""
    weight: dict[int, int] = {}
    for move in moves(plain, adapted):
        for label in (move.before, move.after):
            weight[label] = weight.get(label, 0) + move.count
    changed = plain.classes[:, 0] != adapted.classes[:, 0]
    for label in plain.labels[changed & (plain.labels >= 0)].tolist():
        weight[label] = weight.get(label, 0) + 1
    busiest = sorted(weight, key=lambda label: (-weight[label], label))[:limit]
    classes = tuple(sorted(busiest))
    known = plain.labels >= 0
    rows = _index(plain.labels[known], classes)
    return ChangedConfusion(
        classes,
        _count(rows, _index(plain.classes[known, 0], classes), len(classes)),
        _count(rows, _index(adapted.classes[known, 0], classes), len(classes)),
    )


def _index(labels: npt.NDArray[np.int64], classes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Place of each label among ``classes``, their number where it is none of them."""
    if not classes:
        return np.zeros(len(labels), np.int64)
    place = np.searchsorted(classes, labels)
    place = np.minimum(place, len(classes) - 1)
    found: npt.NDArray[np.int64] = np.where(
        np.asarray(classes)[place] == labels, place, len(classes)
    )
    return found


def _count(
    rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], classes: int
) -> npt.NDArray[np.int64]:
    side = classes + 1
    return np.bincount(rows * side + columns, minlength=side * side).reshape(side, side)


def confusion_figure(found: ChangedConfusion, names: tuple[str, ...]) -> Figure:
    """Cells that gained answers and cells that lost some, with their numbers."""
    from matplotlib.patches import Rectangle

    shown = [names[label] for label in found.classes]
    size = len(shown)
    # The row and column of all other classes are drawn only where something happened.
    rows = size + int(found.difference[-1].any())
    columns = size + int(found.difference[:, -1].any())
    cells = found.difference[:rows, :columns]
    most = max(1, int(np.abs(cells).max(initial=0)))
    with new_figure(2.0 + 0.46 * columns, 1.5 + 0.36 * rows) as figure:
        axes = figure.subplots()
        axes.grid(False)
        axes.imshow(cells, cmap=DIVERGING, vmin=-2 * most, vmax=2 * most, aspect="auto")
        for row, column in zip(*cells.nonzero(), strict=True):
            text = f"{cells[row, column]:+d}".replace("-", "−")
            axes.text(column, row, text, ha="center", va="center", color="#101418")
        for place in range(size):  # the diagonal: right answers
            outline = Rectangle(
                (place - 0.5, place - 0.5), 1, 1, fill=False, edgecolor=FAINT, linewidth=1.1
            )
            axes.add_patch(outline)
        axes.set_xticks(range(columns), [*shown, "other"][:columns], rotation=40, ha="right")
        axes.set_yticks(range(rows), [*shown, "other"][:rows])
        axes.set_xlabel("answer")
        axes.set_ylabel("label")
        for spine in axes.spines.values():
            spine.set_visible(True)
            spine.set_color(INK)
            spine.set_linewidth(0.6)
    return figure
