"""The images of a long prediction run, listed once, in order, each once.

The list is an SQLite file (or database in memory): a run that is continued later sees the same
images under the same numbers, and memory does not grow with the length of the list.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from cliquetta.data.files import EXTENSIONS, open_table, walk_images
from cliquetta.errors import UserError

STDIN = "-"
TABLES = (".csv", ".tsv", ".tab")
_BLOCK = 1 << 16

Entry = tuple[Path, Mapping[str, str]]
"""An image file and what a table says of it."""


class Listing:
    """An opened list; build one with :func:`list_images`."""

    def __init__(self, database: Path | str) -> None:
        self._rows = sqlite3.connect(database, check_same_thread=False)
        self._rows.execute("CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT)")
        self._rows.execute(
            "CREATE TABLE IF NOT EXISTS images "
            "(number INTEGER PRIMARY KEY, path BLOB UNIQUE, columns TEXT, section TEXT)"
        )
        facts = dict(self._rows.execute("SELECT name, value FROM facts"))
        self.columns: list[str] = json.loads(facts.get("columns", "[]"))
        """Columns of input tables, in order."""
        self.unused: Counter[str] = Counter(json.loads(facts.get("unused", "{}")))
        """What folders hold that is not an image, by kind."""
        self.repeated = int(facts.get("repeated", 0))
        """How many paths were named again."""

    def __len__(self) -> int:
        return int(self._rows.execute("SELECT COUNT(*) FROM images").fetchone()[0])

    def entries(self, start: int, stop: int) -> list[Entry]:
        """The images with numbers from ``start`` up to ``stop``, counted from 0."""
        found = self._rows.execute(
            "SELECT path, columns FROM images WHERE number > ? AND number <= ? ORDER BY number",
            (start, stop),
        )
        return [(Path(os.fsdecode(path)), json.loads(columns)) for path, columns in found]

    def groups(self) -> list[tuple[str, int]]:
        """What the images share in the column they are grouped by, and how many of them do."""
        return self._rows.execute(
            "SELECT section, COUNT(*) FROM images GROUP BY section ORDER BY MIN(number)"
        ).fetchall()

    def fill(
        self, entries: Iterator[Entry], unused: Counter[str], group_by: str | None = None
    ) -> None:
        """Store all entries, each path once; ``unused`` is counted while they are read.

        With ``group_by``, the name of a column, images with the same value there follow one
        another, groups in order of their first image.
        """
        columns: dict[str, None] = {}
        for path, row in entries:
            columns |= dict.fromkeys(row)
            added = self._rows.execute(
                "INSERT OR IGNORE INTO images (path, columns, section) VALUES (?, ?, ?)",
                (os.fsencode(path), json.dumps(dict(row)), row.get(group_by or "", "")),
            )
            self.repeated += added.rowcount == 0
        if group_by is not None:
            self._sort_groups(group_by, list(columns))
        self.columns, self.unused = list(columns), unused
        facts = {"columns": self.columns, "unused": unused, "repeated": self.repeated}
        values = [(name, json.dumps(value)) for name, value in facts.items()]
        self._rows.executemany("INSERT INTO facts VALUES (?, ?)", values)
        self._rows.commit()

    def _sort_groups(self, column: str, known: Sequence[str]) -> None:
        if column not in known:
            found = f"found {', '.join(known)}" if known else "only tables have columns"
            raise UserError(f"no column {column!r} to group by in the input: {found}")
        self._rows.executescript(
            "CREATE TEMP TABLE found AS SELECT * FROM images; DELETE FROM images;"
            "INSERT INTO images (path, columns, section) SELECT path, columns, section FROM "
            "(SELECT *, MIN(number) OVER (PARTITION BY section) AS first FROM found) "
            "ORDER BY first, number; DROP TABLE found;"
        )

    def close(self) -> None:
        """Close the file."""
        self._rows.close()


def list_images(
    sources: Sequence[Path | str],
    database: Path | str = ":memory:",
    stdin: Path | None = None,
    group_by: str | None = None,
) -> Listing:
    """List the images of folders (with sub-folders), image files, and tables with a path column.

    A file that is named itself is taken as an image whatever its suffix. Paths in a CSV or TSV
    file count from its folder; its columns are kept. ``-`` is ``stdin``, a file of paths separated
    by line breaks or NUL characters. ``group_by`` names the column whose values the list is sorted
    by (see :meth:`Listing.fill`).
    """
    listing = Listing(database)
    unused: Counter[str] = Counter()
    entries = (entry for source in sources for entry in _expand(source, unused, stdin))
    listing.fill(entries, unused, group_by)
    if not len(listing):
        raise UserError("no images to predict")
    return listing


def _expand(source: Path | str, unused: Counter[str], stdin: Path | None) -> Iterator[Entry]:
    path = Path(source)
    if str(source) == STDIN and stdin is not None:
        with stdin.open("rb") as file:
            yield from ((Path(os.fsdecode(line)), {}) for line in _lines(file))
    elif path.is_dir():
        images = walk_images(path, unused)
        first = next(images, None)
        if first is None:
            kinds = ", ".join(sorted(EXTENSIONS))
            raise UserError(f"no images in {path} (looked for {kinds})")
        yield first, {}
        yield from ((image, {}) for image in images)
    elif not path.exists():
        raise UserError(f"no such file or folder: {path}")
    elif path.suffix.lower() in TABLES:
        with open_table(path) as (column, rows):
            for row in rows:
                kept = {name.strip(): value or "" for name, value in row.items() if name}
                yield path.parent / row[column].strip(), kept
    else:
        yield path, {}


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Paths of a list, separated by NUL if there is one in its first block, else by line."""
    separator, rest = b"\0" if b"\0" in file.read(_BLOCK) else b"\n", b""
    file.seek(0)
    while block := file.read(_BLOCK):
        *whole, rest = (rest + block).split(separator)
        yield from (line for part in whole if (line := part.rstrip(b"\r\n")))
    if last := rest.rstrip(b"\r\n"):
        yield last


def digest(sources: Sequence[Path | str], stdin: Path | None) -> str:
    """Hash of the sources and of the content of lists; the content of folders does not count."""
    found = hashlib.sha256(json.dumps([os.fspath(source) for source in sources]).encode())
    files = [Path(s) for s in sources if Path(s).suffix.lower() in TABLES and Path(s).is_file()]
    for path in [*files, *([stdin] if stdin else [])]:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
    return found.hexdigest()[:16]
