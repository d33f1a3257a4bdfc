"""Rows of predictions as CSV, JSON lines or Parquet, written without holding them all."""

from __future__ import annotations

import csv
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from cliquetta.errors import UnknownNameError, UserError

Row = dict[str, Any]
"""Text, numbers or nothing, by column."""
Columns = Mapping[str, type]
"""``str``, ``float`` or ``bool``, by column."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_ROW_GROUP = 10_000


class TableFormat(ABC):
    """A kind of file that holds rows."""

    @abstractmethod
    def write(self, rows: Iterable[Row], columns: Columns, file: BinaryIO) -> None:
        """Write all rows; a column that a row lacks is left empty."""


class CSVFormat(TableFormat):
    """Comma-separated values in UTF-8 that a spreadsheet does not take for formulas."""

    def write(self, rows: Iterable[Row], columns: Columns, file: BinaryIO) -> None:
        """Write a header and all rows."""
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        try:
            lines = csv.writer(text)
            lines.writerow([_cell(name) for name in columns])
            lines.writerows([_cell(row.get(name)) for name in columns] for row in rows)
        finally:
            text.detach()


class JSONLinesFormat(TableFormat):
    """One JSON object per line; empty cells are null."""

    def write(self, rows: Iterable[Row], columns: Columns, file: BinaryIO) -> None:
        """Write all rows."""
        for row in rows:
            whole = {name: row.get(name) or None for name in columns}
            whole |= {name: row.get(name) for name, kind in columns.items() if kind is not str}
            file.write(json.dumps(whole, ensure_ascii=False).encode() + b"\n")


class ParquetFormat(TableFormat):
    """Apache Parquet (extra ``parquet``)."""

    def __init__(self) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise UserError(
                "Parquet files need an extra: pip install 'cliquetta[parquet]'"
            ) from None

    def write(self, rows: Iterable[Row], columns: Columns, file: BinaryIO) -> None:
        """Write all rows, a group at a time."""
        import pyarrow
        import pyarrow.parquet

        kinds = {str: pyarrow.string(), float: pyarrow.float64(), bool: pyarrow.bool_()}
        schema = pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
        remaining = iter(rows)
        with pyarrow.parquet.ParquetWriter(file, schema) as writer:
            while group := list(islice(remaining, _ROW_GROUP)):
                whole = [{name: row.get(name) for name in columns} for row in group]
                writer.write_table(pyarrow.Table.from_pylist(whole, schema))


_FORMATS: dict[str, type[TableFormat]] = {
    "csv": CSVFormat,
    "jsonl": JSONLinesFormat,
    "parquet": ParquetFormat,
}


def pick_format(path: Path, name: str | None = None) -> TableFormat:
    """The format of a name, or else of the suffix of a file; CSV for a file without a suffix.

    Raises:
        UnknownNameError: There is no such format.

    """
    name = name or path.suffix.lower().removeprefix(".") or "csv"
    if name not in _FORMATS:
        raise UnknownNameError("file format", name, _FORMATS)
    return _FORMATS[name]()


def shown_path(path: str) -> str:
    """A path as text, with escapes for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _cell(value: str | float | bool | None) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6f}"
    return f"'{value}" if value.startswith(_FORMULA) and not _is_number(value) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
