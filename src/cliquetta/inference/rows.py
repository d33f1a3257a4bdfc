"""Rows of predictions: their columns, the counts of a run, and files that hold them."""

import csv
import importlib.util
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from cliquetta.errors import UserError, look_up
from cliquetta.types import Prediction

Row = dict[str, Any]  # text, numbers or nothing, by column
Columns = Mapping[str, type]  # `str`, `float` or `bool`, by column
WriteTable = Callable[[Iterable[Row], Columns, BinaryIO], None]  # what a row lacks is left empty

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_ROW_GROUP = 10_000


def write_csv(rows: Iterable[Row], columns: Columns, file: BinaryIO) -> None:
    """Comma-separated values in UTF-8 that a spreadsheet does not take for formulas."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    try:
        lines = csv.writer(text)
        lines.writerow([_cell(name) for name in columns])
        lines.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    finally:
        text.detach()


def write_json_lines(rows: Iterable[Row], columns: Columns, file: BinaryIO) -> None:
    """One JSON object per line; empty cells are null."""
    for row in rows:
        values = {
            name: (row.get(name) or None) if kind is str else row.get(name)
            for name, kind in columns.items()
        }
        file.write(json.dumps(values, ensure_ascii=False).encode() + b"\n")


def write_parquet(rows: Iterable[Row], columns: Columns, file: BinaryIO) -> None:
    """Apache Parquet (extra ``parquet``), a group of rows at a time."""
    import pyarrow
    import pyarrow.parquet

    kinds = {str: pyarrow.string(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
    remaining = iter(rows)
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        while group := list(islice(remaining, _ROW_GROUP)):
            filled = [{name: row.get(name) for name in columns} for row in group]
            writer.write_table(pyarrow.Table.from_pylist(filled, schema))


_FORMATS = {"csv": write_csv, "jsonl": write_json_lines, "parquet": write_parquet}


def pick_format(path: Path, name: str | None = None) -> WriteTable:
    """The writer of a named format, or else of a file's suffix; CSV without a suffix."""
    name = name or path.suffix.lower().removeprefix(".") or "csv"
    write_table = look_up("file format", name, _FORMATS)
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("Parquet files need an extra: pip install 'cliquetta[parquet]'")
    return write_table


def _cell(value: str | float | bool | None) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6f}"
    if value.startswith(_FORMULA):
        try:
            float(value)
        except ValueError:
            return f"'{value}"
    return value


@dataclass(frozen=True)
class RowFormat:
    """The output columns of some methods, and how predictions become rows."""

    methods: tuple[str, ...]
    classes: tuple[str, ...]
    top_k: int = 1
    all_probabilities: bool = False
    multi_label: float | None = None  # classes have sigmoids, and all that reach it are listed
    reject: float | None = None  # share of images of none of the classes to look for
    calibrate: bool | None = None  # probabilities of calibrated logits; `None`: where that is free

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
    """Number of images for which each class came first, by method."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Number of images of none of the classes, by method, if asked for; also in ``classes``."""
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
    """The state was of another class list: what does not depend on the classes stays."""
    health: dict[str, dict[str, int | float | str]] = field(default_factory=dict)
    """Figures of how adaptation did in the last batch, with a verdict, by method that has one."""

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
