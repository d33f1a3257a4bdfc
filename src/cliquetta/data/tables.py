"""A CSV or TSV file of paths and classes as a data set."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from cliquetta.data.dataset import FileDataset
from cliquetta.data.labels import CLASS_FILES, TEMPLATE_FILES, number_labels, read_beside
from cliquetta.errors import UserError
from cliquetta.prompts.classes import DEFAULT_TEMPLATE

PATH_COLUMNS = ("path", "file", "filename", "filepath", "file_name", "image")
LABEL_COLUMNS = ("class", "label", "class_name", "category", "target")


def table_dataset(
    table: Path, names: Sequence[str] | None = None, templates: Sequence[str] | None = None
) -> FileDataset:
    """The images that ``table`` names; relative paths count from its folder.

    The first line names the columns: one of :data:`PATH_COLUMNS` and, if the classes are known,
    one of :data:`LABEL_COLUMNS` with names or numbers. Class list and templates are taken from
    ``classnames.txt`` and ``templates.txt`` beside the table if they are not given.
    """
    if not table.is_file():
        raise UserError(f"no table {table}")
    paths, said = _read(table)
    names = names or read_beside(table.parent, CLASS_FILES)
    names, labels = number_labels(said, names, str(table))
    first = {path: row for row, path in reversed(list(enumerate(paths)))}
    rows = sorted(first.values())  # a path that stands twice counts once
    if labels is not None:
        _check_agreement(table, paths, labels, first)
    return FileDataset(
        f"csv:{table.as_posix()}",
        [table.parent / paths[row] for row in rows],
        names=names,
        keys=[paths[row] for row in rows],
        labels=None if labels is None else [labels[row] for row in rows],
        templates=templates or read_beside(table.parent, TEMPLATE_FILES) or (DEFAULT_TEMPLATE,),
    )


def _read(table: Path) -> tuple[list[str], list[str | None]]:
    """Paths and what is said of their classes, row by row."""
    delimiter = "\t" if table.suffix.lower() in {".tsv", ".tab"} else ","
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, delimiter=delimiter))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{table} is not a table in UTF-8 ({error})") from None
    if not rows:
        raise UserError(f"{table} has no rows below its header")
    columns = {name.strip().lower(): name for name in rows[0] if name}
    path_column = _column(columns, PATH_COLUMNS)
    if path_column is None:
        raise UserError(
            f"{table} has no column of paths: name one of its columns "
            f"{' or '.join(PATH_COLUMNS)}; found {', '.join(columns)}"
        )
    label_column = _column(columns, LABEL_COLUMNS)
    rows = [row for row in rows if (row[path_column] or "").strip()]
    said = [(row[label_column] or "").strip() or None if label_column else None for row in rows]
    return [row[path_column].strip() for row in rows], said


def _column(columns: dict[str, str], wanted: Sequence[str]) -> str | None:
    return next((columns[name] for name in wanted if name in columns), None)


def _check_agreement(
    table: Path, paths: Sequence[str], labels: Sequence[int], first: dict[str, int]
) -> None:
    for path, label in zip(paths, labels, strict=True):
        if labels[first[path]] != label:
            raise UserError(f"{table} names {path} twice, with different classes")
