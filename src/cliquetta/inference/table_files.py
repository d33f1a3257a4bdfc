"""Rows of predictions as CSV, JSON lines or Parquet, written without holding them all."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from cliquetta.errors import UnknownNameError, UserError

Row = dict[str, Any]
"""Text, numbers or nothing, by column."""
Columns = Mapping[str, type]
"""``str``, ``float`` or ``bool``, by column."""
WriteTable = Callable[[Iterable[Row], Columns, BinaryIO], None]
"""Writes all rows; a column that a row lacks is left empty."""

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


_FORMATS: dict[str, WriteTable] = {
    "csv": write_csv,
    "jsonl": write_json_lines,
    "parquet": write_parquet,
}


def pick_format(path: Path, name: str | None = None) -> WriteTable:
    """The writer of a named format, or else of a file's suffix; CSV without a suffix."""
    name = name or path.suffix.lower().removeprefix(".") or "csv"
    if name not in _FORMATS:
        raise UnknownNameError("file format", name, _FORMATS)
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("Parquet files need an extra: pip install 'cliquetta[parquet]'")
    return _FORMATS[name]


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
