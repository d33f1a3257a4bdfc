"""The images of a long prediction run, listed once, in order, each once.

The list is an SQLite file (or database in memory): a run that is continued later sees the same
images under the same numbers, and memory does not grow with the length of the list.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from PIL import Image

from cliquetta.data.dataset import Dataset
from cliquetta.data.files import EXTENSIONS, path_column, read_table, walk_images
from cliquetta.data.inputs import is_table
from cliquetta.data.loader import ImageGroup
from cliquetta.data.remote import (
    find_filesystem,
    is_url,
    join_url,
    naming,
    open_listed,
    open_location,
    walk_urls,
)
from cliquetta.data.tar import expand_braces, list_members
from cliquetta.errors import UserError

STDIN = "-"
PARQUET = ".parquet"
TABLES = (".csv", ".tsv", ".tab", PARQUET)
TAR = ".tar"
_PACKED = (".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
_BLOCK = 1 << 16


class Entry(NamedTuple):
    """An image of a list."""

    path: str
    """A local path, a URL, or those of a tar file with the name of one of its members."""
    columns: Mapping[str, str]
    """Its row of a table."""
    member: tuple[str, int, int] | None = None
    """Tar file, offset and size of an image in one."""


class ListedImages(Dataset):
    """Images of a list, read when they are asked for."""

    def __init__(self, entries: Sequence[Entry], *, shorter: int | None = None) -> None:
        super().__init__("list", names=(), keys=[entry.path for entry in entries], labels=None)
        self.entries = entries
        self.shorter = shorter
        """Passed to :func:`open_image`."""

    def load(self, index: int) -> Image.Image:
        """Image ``index`` in RGB; raises :class:`ImageError` if it cannot be read."""
        path, _, member = self.entries[index]
        return open_listed(path, member, shorter=self.shorter)


def find_listed(entries: Sequence[Entry], *, shorter: int | None) -> list[ImageGroup]:
    """Images of a list, for a loader."""
    positions = range(len(entries))
    images = ListedImages(entries, shorter=shorter)
    return [ImageGroup(images, positions, images.keys, positions)]


class ImageList:
    """An opened list; build one with :func:`list_images`."""

    def __init__(self, database: Path | str) -> None:
        self._rows = sqlite3.connect(database, check_same_thread=False)
        self._rows.execute("CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT)")
        self._rows.execute(
            "CREATE TABLE IF NOT EXISTS images "
            "(number INTEGER PRIMARY KEY, path BLOB UNIQUE, columns TEXT, section TEXT, "
            "member TEXT)"
        )
        facts = dict(self._rows.execute("SELECT name, value FROM facts"))
        self.columns: list[str] = json.loads(facts.get("columns", "[]"))
        """Columns of input tables, in order."""
        self.unused: Counter[str] = Counter(json.loads(facts.get("unused", "{}")))
        """Files in folders that are no images, counted by kind."""
        self.repeated = int(facts.get("repeated", 0))
        """How many paths were named again."""

    def __len__(self) -> int:
        return int(self._rows.execute("SELECT COUNT(*) FROM images").fetchone()[0])

    def entries(self, start: int, stop: int) -> list[Entry]:
        """The images with numbers from ``start`` up to ``stop``, counted from 0."""
        found = self._rows.execute(
            "SELECT path, columns, member FROM images WHERE number > ? AND number <= ? "
            "ORDER BY number",
            (start, stop),
        )
        return [
            Entry(os.fsdecode(path), json.loads(columns), tuple(json.loads(member)) or None)
            for path, columns, member in found
        ]

    @property
    def in_memory(self) -> bool:
        """Whether images are on fsspec's file system in the memory of this process."""
        query = (
            "SELECT 1 FROM images WHERE path LIKE 'memory:%' OR member LIKE '%\"memory:%' LIMIT 1"
        )
        return self._rows.execute(query).fetchone() is not None

    def groups(self) -> list[tuple[str, int]]:
        """Values of the column that images are grouped by, with their counts."""
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
        for path, row, member in entries:
            columns |= dict.fromkeys(row)
            group, position = row.get(group_by or "", ""), json.dumps(member or ())
            added = self._rows.execute(
                "INSERT OR IGNORE INTO images (path, columns, section, member) VALUES (?, ?, ?, ?)",
                (os.fsencode(path), json.dumps(dict(row)), group, position),
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
            "INSERT INTO images (path, columns, section, member) "
            "SELECT path, columns, section, member FROM "
            "(SELECT *, MIN(number) OVER (PARTITION BY section) AS first FROM found) "
            "ORDER BY first, number; DROP TABLE found;"
        )

    def close(self) -> None:
        """Close the file."""
        self._rows.close()


Source = Any
"""A path or URL of images or of a table, or a DataFrame."""


def list_images(
    sources: Sequence[Source],
    database: Path | str = ":memory:",
    stdin: Path | None = None,
    group_by: str | None = None,
) -> ImageList:
    """List the images of folders, image files, tar shards, and tables with a path column.

    Each may be a URL (:mod:`cliquetta.data.remote`), a table also a DataFrame. A file that is
    named itself is taken as an image whatever its suffix. Paths in a CSV, TSV or Parquet file count
    from its folder; its columns are kept. ``shard-{000..012}.tar`` stands for thirteen tar files.
    ``-`` is ``stdin``, a file of paths separated by line breaks or NUL characters. ``group_by``
    names the column whose values the list is sorted by (see :meth:`ImageList.fill`).
    """
    listing = ImageList(database)
    unused: Counter[str] = Counter()

    def entries() -> Iterator[Entry]:
        for source in sources:
            with naming(source):
                yield from _expand(source, unused, stdin)

    listing.fill(entries(), unused, group_by)
    if not len(listing):
        raise UserError("no images to predict")
    return listing


def _expand(source: Source, unused: Counter[str], stdin: Path | None) -> Iterator[Entry]:
    if is_table(source):
        rows: list[dict[str, str]] = source.fillna("").astype(str).to_dict("records")
        column = path_column([str(name) for name in source.columns], "the DataFrame")
        yield from (Entry(row[column], row) for row in rows if row[column].strip())
        return
    if str(source) == STDIN and stdin is not None:
        with stdin.open("rb") as file:
            yield from (Entry(os.fsdecode(line), {}) for line in _lines(file))
        return
    url = is_url(source)
    suffix = posixpath.splitext(str(source))[1].lower()
    if suffix == TAR:
        for shard in expand_braces(str(source)):
            yield from _members(shard)
    elif suffix in TABLES and (url or not Path(source).is_dir()):
        yield from _listed(str(source))
    elif find_filesystem(str(source))[0].isdir(source) if url else Path(source).is_dir():
        images = (
            walk_urls(str(source), unused) if url else map(str, walk_images(Path(source), unused))
        )
        first = next(images, None)
        if first is None:
            kinds = ", ".join(sorted(EXTENSIONS))
            raise UserError(f"no images in {source} (looked for {kinds})")
        yield Entry(first, {})
        yield from (Entry(image, {}) for image in images)
    else:
        _require(str(source))
        if suffix in _PACKED:
            raise UserError(
                f"{source} is compressed: unpack it and name the folder, or make it a .tar file"
            )
        yield Entry(str(source), {})


def _require(source: str) -> None:
    filesystem = find_filesystem(source)[0] if is_url(source) else None
    if not (filesystem.exists(source) if filesystem else Path(source).exists()):
        raise UserError(f"no such file or folder: {source}")


def _members(shard: str) -> Iterator[Entry]:
    """The images in a tar file, named by it and their file names."""
    _require(shard)
    for name, offset, size in list_members(shard):
        yield Entry(f"{shard}/{name}", {}, (shard, offset, size))


def _listed(table: str) -> Iterator[Entry]:
    """The images that a table names; relative paths count from its folder."""
    _require(table)
    folder = table.rpartition("/")[0] if is_url(table) else os.fspath(Path(table).parent)
    with open_location(table) as file, _rows_of(file, table) as (column, rows):
        for row in rows:
            path = row[column].strip()
            if is_url(table):
                path = join_url(folder, path)
            elif not is_url(path):
                path = os.fspath(Path(folder) / path)
            yield Entry(path, {name.strip(): value or "" for name, value in row.items() if name})


@contextmanager
def _rows_of(file: BinaryIO, table: str) -> Iterator[tuple[str, Iterator[Mapping[str, str]]]]:
    """The column of paths and the rows of a table in CSV, TSV or Parquet."""
    if not table.lower().endswith(PARQUET):
        with read_table(file, table) as found:
            yield found
        return
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError("Parquet files need an extra: pip install 'cliquetta[parquet]'") from None
    try:
        opened = ParquetFile(file)
    except ArrowInvalid as error:
        raise UserError(f"{table} is not a Parquet file ({error})") from None
    column = path_column(opened.schema_arrow.names, table)
    rows = (row for batch in opened.iter_batches(10_000) for row in batch.to_pylist())
    texts = ({k: "" if v is None else str(v) for k, v in row.items()} for row in rows)
    yield column, (row for row in texts if row[column].strip())


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Paths of a list, separated by NUL if there is one in its first block, else by line."""
    separator, rest = b"\0" if b"\0" in file.read(_BLOCK) else b"\n", b""
    file.seek(0)
    while block := file.read(_BLOCK):
        *whole, rest = (rest + block).split(separator)
        yield from (line for part in whole if (line := part.rstrip(b"\r\n")))
    if last := rest.rstrip(b"\r\n"):
        yield last


def digest(sources: Sequence[Source], stdin: Path | None) -> str:
    """Hash of the sources and of the content of lists; the content of folders does not count."""
    names = [s.to_csv() if is_table(s) else os.fspath(s) for s in sources]
    found = hashlib.sha256(json.dumps(names).encode())
    tables = [s for s in sources if not is_table(s) and str(s).lower().endswith(TABLES)]
    files = [s for s in tables if is_url(s) or Path(s).is_file()]
    for path in [*files, *([stdin] if stdin else [])]:
        with naming(path), open_location(path) as file:
            while block := file.read(_BLOCK):
                found.update(block)
    return found.hexdigest()[:16]
