"""Files that hold tables of rows: CSV, JSON lines and Parquet."""

import csv
import importlib.util
import io
import json
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from cliquetta.errors import UserError, look_up

Row = dict[str, Any]  # text, numbers or nothing, by column
Columns = Mapping[str, type]  # `str`, `float` or `bool`, by column
WriteTable = Callable[
    [Iterable[Row], Columns, BinaryIO], None
]  # what a row lacks is left empty

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet begins a formula with
_ROW_GROUP = 10_000  # rows that Parquet writes at a time


def write_csv(rows: Iterable[Row], columns: Columns, file: BinaryIO) -> None:
    """Write comma-separated values in UTF-8 that a spreadsheet does not take for formulas."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    try:
        lines = csv.writer(text)
        lines.writerow([_cell(name) for name in columns])
        lines.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    finally:
        text.detach()


def write_json_lines(rows: Iterable[Row], columns: Columns, file: BinaryIO) -> None:
    """Write one JSON object per line; empty cells are null."""
    for row in rows:
        values = {
            name: (row.get(name) or None) if kind is str else row.get(name)
            for name, kind in columns.items()
        }
        file.write(json.dumps(values, ensure_ascii=False).encode() + b"\n")


def write_parquet(rows: Iterable[Row], columns: Columns, file: BinaryIO) -> None:
    """Write Apache Parquet (extra ``parquet``), a group of rows at a time."""
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
    """Return the writer of a named format, or else of a file's suffix; CSV without a suffix."""
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
