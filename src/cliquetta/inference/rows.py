"""Columns and rows of a prediction run, and its counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cliquetta.errors import UserError
from cliquetta.inference.table_files import Row
from cliquetta.types import Prediction


@dataclass(frozen=True)
class RowFormat:
    """The output columns of some methods, and how predictions become rows."""

    methods: tuple[str, ...]
    classes: tuple[str, ...]
    top_k: int = 1
    all_probabilities: bool = False
    multi_label: float | None = None
    """If given, classes are scored independently, by sigmoids, and all that reach it are listed."""
    reject: float | None = None
    """If given, images of none of the classes are named: how many to look for."""
    calibrate: bool | None = None
    """Whether probabilities are those of calibrated logits; ``None``: where that costs nothing."""

    def prefix(self, method: str) -> str:
        """Prefix of the names of a method's columns."""
        return "" if len(self.methods) == 1 else f"{method}_"

    def columns(self) -> dict[str, type]:
        """Names and types of the columns of all methods."""
        columns: dict[str, type] = {}
        for prefix in map(self.prefix, self.methods):
            for rank in range(1, self.top_k + 1):
                suffix = "" if rank == 1 else f"_{rank}"
                columns[f"{prefix}prediction{suffix}"] = str
                columns[f"{prefix}probability{suffix}"] = float
            if self.multi_label is not None:
                columns[f"{prefix}labels"] = str
            if self.reject is not None:
                columns |= {f"{prefix}rejected": bool, f"{prefix}rejection_score": float}
            if self.all_probabilities:
                columns |= {f"{prefix}p_{name}": float for name in self.classes}
        return columns

    def rows(self, predictions: Mapping[str, Prediction]) -> list[Row]:
        """One row per image of the predictions of every method."""
        columns = list(self.columns())
        rows: list[list[Any]] = [[] for _ in next(iter(predictions.values())).logits]
        for method in self.methods:
            prediction, least = predictions[method], self.multi_label
            independent = least is not None
            best, ranked = prediction.top(self.top_k, independent=independent)
            scores = prediction.logits.sigmoid() if independent else prediction.probabilities
            rejections = self._rejections(prediction)
            for row, values, indices, every, rejection in zip(
                rows, best.tolist(), ranked.tolist(), scores, rejections, strict=True
            ):
                for index, value in zip(indices, values, strict=True):
                    row += [self.classes[index], round(value, 6)]
                if least is not None:
                    reached = (every >= least).nonzero()[:, 0]
                    order = reached[every[reached].argsort(descending=True)].tolist()
                    row.append(";".join(self.classes[index] for index in order))
                row += rejection
                if self.all_probabilities:
                    row += [round(value, 6) for value in every.tolist()]
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def _rejections(self, prediction: Prediction) -> list[tuple[Any, ...]]:
        """Cells of each image: none where rejection was not asked for."""
        rejection = prediction.rejection
        if self.reject is None or rejection is None:
            return [()] * len(prediction.logits)
        scores = [round(score, 6) for score in rejection.score.tolist()]
        return list(zip(rejection.rejected.tolist(), scores, strict=True))


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
    """By method: how often each class came first."""
    rejected: dict[str, int] = field(default_factory=dict)
    """By method, where asked for: images of none of the classes, which are in ``classes``, too."""
    rows: list[Row] = field(default_factory=list)
    """Path, predictions and error of every image; empty where they went to a file only.

    Predictions of an image that could not be read are ``None``.
    """
    repeated: int = 0
    """Paths that were named again."""
    unused: Counter[str] = field(default_factory=Counter)
    """Files in folders that are not images, by kind."""
    out: Path | str | None = None
    classes_changed: bool = False
    """The state was of another class list: what did not depend on the classes was kept."""
    health: dict[str, dict[str, int | float | str]] = field(default_factory=dict)
    """By method that tells: how adaptation was doing in the last batch, with its verdict."""

    def to_pandas(self) -> Any:
        """The rows as a DataFrame.

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
            predicted = row[f"{row_format.prefix(method)}prediction"]
            if predicted is not None:
                self.classes.setdefault(method, Counter())[predicted] += 1
            if row_format.reject is not None:
                rejected = bool(row[f"{row_format.prefix(method)}rejected"])
                self.rejected[method] = self.rejected.get(method, 0) + rejected
