"""Rows of predictions: their columns, how predictions fill them, and the counts of a run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from cliquetta.errors import UserError
from cliquetta.inference.options import PredictOptions
from cliquetta.inference.scores import MethodScores
from cliquetta.inference.tables import Row
from cliquetta.types import Prediction, Rejection

LABEL = "label"  # the column of the class that an image is known to show
DIGITS = 6  # of probabilities
ZERO_SHOT = "zero_shot"  # the method of plain CLIP, and the prefix of its columns


@dataclass(frozen=True)
class RowFormat:
    """The output columns of some methods, and how predictions become rows.

    Plain CLIP stands beside the methods if ``zero_shot`` is asked for or labels are
    known, unless it is one of them.
    """

    methods: tuple[str, ...]
    classes: tuple[str, ...]
    options: PredictOptions = field(default_factory=PredictOptions)

    @cached_property
    def top_k(self) -> int:
        """Classes that are listed per image."""
        return min(self.options.top_k, len(self.classes))

    @property
    def labelled(self) -> bool:
        """Whether there is a column of labels."""
        return self.options.labels is not None

    @property
    def adds_zero_shot(self) -> bool:
        """Whether plain CLIP predicts beside the methods."""
        wanted = self.options.zero_shot or self.labelled
        return wanted and ZERO_SHOT not in self.methods

    @property
    def zero_shot_column(self) -> str | None:
        """The column of plain CLIP's predictions to compare a method with, if there is one."""
        beside_others = ZERO_SHOT in self.methods and len(self.methods) > 1
        return (
            f"{ZERO_SHOT}_prediction" if self.adds_zero_shot or beside_others else None
        )

    def prefix(self, method: str) -> str:
        """Prefix of the names of a method's columns."""
        return "" if len(self.methods) == 1 else f"{method}_"

    def columns(self) -> dict[str, type]:
        """Names and types of the columns of all methods."""
        columns: dict[str, type] = {}
        for method in self.methods:
            columns |= self._columns_of(method)
        if self.adds_zero_shot:
            columns[f"{ZERO_SHOT}_prediction"] = str
            columns[f"{ZERO_SHOT}_probability"] = float
        return columns

    def _columns_of(self, method: str) -> dict[str, type]:
        prefix = self.prefix(method)
        columns: dict[str, type] = {}
        for rank in range(1, self.top_k + 1):
            suffix = "" if rank == 1 else f"_{rank}"
            columns[f"{prefix}prediction{suffix}"] = str
            columns[f"{prefix}probability{suffix}"] = float
        if self.options.multi_label is not None:
            columns[f"{prefix}labels"] = str
        if self.options.reject is not None:
            columns[f"{prefix}rejected"] = bool
            columns[f"{prefix}rejection_score"] = float
        if self.options.all_probabilities:
            for name in self.classes:
                columns[f"{prefix}p_{name}"] = float
        return columns

    def rows(
        self, predictions: Mapping[str, Prediction], zero_shot: Prediction | None = None
    ) -> list[Row]:
        """Return one row per image.

        Args:
            predictions: Those of every method, by name.
            zero_shot: That of plain CLIP, where it stands beside the methods.

        """
        columns = list(self.columns())
        first = predictions[self.methods[0]]
        # the cells of every image, in the order of the columns
        cells: list[list[Any]] = [[] for _ in range(len(first.logits))]
        for method in self.methods:
            self._fill(cells, predictions[method])
        if zero_shot is not None:
            self._fill_best(cells, zero_shot, count=1)
        return [dict(zip(columns, row, strict=True)) for row in cells]

    def _fill(self, cells: list[list[Any]], prediction: Prediction) -> None:
        """Append the cells of one method to every row."""
        self._fill_best(cells, prediction, count=self.top_k)
        least = self.options.multi_label
        scores = prediction.probabilities
        if least is not None:
            scores = prediction.logits.sigmoid()
            for row, every in zip(cells, scores, strict=True):
                row.append(";".join(self._reached(every, least)))
        if self.options.reject is not None and prediction.rejection is not None:
            self._fill_rejection(cells, prediction.rejection)
        if self.options.all_probabilities:
            for row, every in zip(cells, scores.tolist(), strict=True):
                row += [round(value, DIGITS) for value in every]

    def _fill_rejection(self, cells: list[list[Any]], rejection: Rejection) -> None:
        """Append whether every image is of none of the classes, and how unsure it is."""
        rejected = rejection.rejected.tolist()
        scores = rejection.score.tolist()
        for row, none_of_these, score in zip(cells, rejected, scores, strict=True):
            row.append(none_of_these)
            row.append(round(score, DIGITS))

    def _fill_best(
        self, cells: list[list[Any]], prediction: Prediction, *, count: int
    ) -> None:
        """Append the best classes of every image, with their probabilities."""
        independent = self.options.multi_label is not None
        best, ranked = prediction.topk(count, independent=independent)
        probabilities = best.tolist()
        classes = ranked.tolist()
        for row, values, indices in zip(cells, probabilities, classes, strict=True):
            for index, value in zip(indices, values, strict=True):
                row.append(self.classes[index])
                row.append(round(value, DIGITS))

    def _reached(self, probabilities: Tensor, least: float) -> list[str]:
        """Return the classes that are at least so probable, the best first."""
        reached = (probabilities >= least).nonzero()[:, 0]
        order = probabilities[reached].argsort(descending=True)
        return [self.classes[index] for index in reached[order].tolist()]


@dataclass
class PredictionRun:
    """The outcome of :func:`~cliquetta.predict`."""

    images: int = 0
    """Images in the list (of the shard)."""
    skipped: int = 0
    """Images of these that could not be read."""
    before: int = 0
    """Images of these that an earlier, stopped run had done."""
    seconds: float = 0.0
    busy: float = 0.0
    """Seconds in which the methods worked, added over actors."""
    waited: float = 0.0
    """Seconds in which the methods waited for images, added over actors."""
    classes: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of images for which each class came first, by method."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Number of images of none of the classes, by method, if asked for; also in ``classes``."""
    scores: dict[str, MethodScores] = field(default_factory=dict)
    """Agreement with labels, by method, if they are known."""
    unlabelled: int = 0
    """Images that were predicted and have no label, if labels are known."""
    rows: list[Row] = field(default_factory=list)
    """Path, predictions and error of every image; empty where they went to a file only.

    Predictions of an image that could not be read are ``None``.
    """
    shuffled: bool = False
    """Whether images were predicted in a random order; rows are in the order of the list."""
    repeated: int = 0
    """Paths that were named again."""
    unused: Counter[str] = field(default_factory=Counter)
    """Files in folders that are not images, by kind."""
    out: Path | str | None = None
    classes_changed: bool = False
    """The state was of another class list: what does not depend on the classes stays."""
    health: dict[str, dict[str, int | float | str]] = field(default_factory=dict)
    """Figures of how adaptation did in the last batch, by method that has them."""

    def to_pandas(self) -> Any:
        """Return the rows as a DataFrame.

        Raises:
            UserError: pandas is not installed.

        """
        try:
            import pandas
        except ImportError:
            raise UserError("a DataFrame needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.rows)

    def count(self, row_format: RowFormat, row: Row) -> None:
        """Count a row of the table."""
        self.images += 1
        self.skipped += bool(row["error"])
        for method in row_format.methods:
            prefix = row_format.prefix(method)
            predicted = row[f"{prefix}prediction"]
            if predicted is not None:
                counts = self.classes.setdefault(method, Counter())
                counts[predicted] += 1
            if row_format.options.reject is not None:
                self.rejected.setdefault(method, 0)
                self.rejected[method] += bool(row[f"{prefix}rejected"])
        if row_format.labelled and not row["error"]:
            self._score(row_format, row)

    def _score(self, row_format: RowFormat, row: Row) -> None:
        """Compare the predictions of an image with its label."""
        label = row[LABEL]
        self.unlabelled += not label
        column = row_format.zero_shot_column
        for method in row_format.methods:
            scores = self.scores.setdefault(method, MethodScores())
            if not label:
                continue
            zero_shot = None
            if column is not None and method != ZERO_SHOT:
                zero_shot = row[column]
            predicted = row[f"{row_format.prefix(method)}prediction"]
            scores.add(label=label, predicted=predicted, zero_shot=zero_shot)
