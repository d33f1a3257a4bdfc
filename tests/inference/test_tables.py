"""Files that hold tables: what a row lacks, formulas, and formats by their suffix."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from cliquetta.errors import UserError
from cliquetta.inference.tables import pick_format

COLUMNS = {"path": str, "probability": float, "rejected": bool}
ROWS: list[dict[str, Any]] = [
    {"path": "=a.png", "probability": 0.5, "rejected": True},
    {"path": "b.png", "probability": None},
]


def written(name: str) -> bytes:
    file = io.BytesIO()
    pick_format(Path(name))(ROWS, COLUMNS, file)
    return file.getvalue()


def test_csv_leaves_gaps_empty_and_defuses_formulas() -> None:
    lines = written("table").decode().splitlines()  # CSV without a suffix
    assert lines == ["path,probability,rejected", "'=a.png,0.500000,true", "b.png,,"]


def test_json_lines_and_parquet_have_nulls_for_gaps() -> None:
    expected = [ROWS[0], {"path": "b.png", "probability": None, "rejected": None}]
    assert [json.loads(line) for line in written("a.JSONL").splitlines()] == expected
    table = parquet.read_table(io.BytesIO(written("a.parquet")))
    assert table.to_pylist() == expected


def test_a_name_goes_before_the_suffix() -> None:
    assert pick_format(Path("a.csv"), "jsonl") is pick_format(Path("a.jsonl"))
    with pytest.raises(UserError, match="xlsx"):
        pick_format(Path("a.xlsx"))
