"""The images of a long prediction run, listed once, in order, each once, in an SQLite file.

A run that is continued sees the same images under the same numbers; memory does not grow.
"""

import hashlib
import json
import os
import posixpath
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from PIL import Image

from cliquetta.data.dataset import Dataset, FileDataset
from cliquetta.data.files import PARQUET, no_images, open_table, path_column, walk_images
from cliquetta.data.inputs import ImageLike, is_table, to_picture
from cliquetta.data.loader import ImageGroup
from cliquetta.data.remote import (
    Member,
    find_filesystem,
    is_url,
    join_url,
    naming,
    open_location,
    require_exists,
    walk_urls,
)
from cliquetta.data.tar import expand_braces, list_members
from cliquetta.errors import UserError

STDIN = "-"
TABLES = (".csv", ".tsv", ".tab", PARQUET)
TAR = ".tar"
_PACKED = (".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
_BLOCK = 1 << 16


class Entry(NamedTuple):
    """An image of a list."""

    path: str  # a local path, a URL, or those of a tar file with the name of one of its members
    columns: Mapping[str, str]
    member: Member | None = None
    image: ImageLike | None = None  # one in memory, which ``path`` names


class _Pictures(Dataset):
    """Images in memory, or paths among these."""

    def __init__(self, paths: Sequence[str], images: Sequence[ImageLike]) -> None:
        super().__init__("images", names=(), keys=paths, labels=None)
        self.images = images

    def load(self, index: int) -> Image.Image:
        """Image ``index`` in RGB."""
        return to_picture(self.images[index])[1]


def find_listed(entries: Sequence[Entry], *, shorter: int | None) -> list[ImageGroup]:
    """Images of a list, for a loader."""
    paths, rows = [entry.path for entry in entries], range(len(entries))
    images = [entry.image for entry in entries if entry.image is not None]
    members = [entry.member for entry in entries]
    data = (
        _Pictures(paths, images)
        if images
        else FileDataset("list", paths, names=(), labels=None, members=members, shorter=shorter)
    )
    return [ImageGroup(data, rows, paths, rows)]


class ImageList:
    """An opened list; build one with :func:`list_images`."""

    def __init__(self, database: Path | str) -> None:
        self._rows = sqlite3.connect(database, check_same_thread=False)
        self._rows.executescript(
            "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);"
            "CREATE TABLE IF NOT EXISTS images (number INTEGER PRIMARY KEY, path BLOB UNIQUE, "
            "columns TEXT, section TEXT, member TEXT)"
        )
        facts = dict(self._rows.execute("SELECT name, value FROM facts"))
        self.columns: list[str] = json.loads(facts.get("columns", "[]"))  # of input tables
        # files in folders that are no images, counted by kind
        self.unused: Counter[str] = Counter(json.loads(facts.get("unused", "{}")))
        self.repeated = int(facts.get("repeated", 0))  # how many paths were named again

    def __len__(self) -> int:
        return int(self._rows.execute("SELECT COUNT(*) FROM images").fetchone()[0])

    def entries(self, start: int, stop: int) -> list[Entry]:
        """The images with numbers from ``start`` up to ``stop``, counted from 0."""
        rows = self._rows.execute(
            "SELECT path, columns, member FROM images WHERE number BETWEEN ? AND ? ORDER BY number",
            (start + 1, stop),
        )
        entries = []
        for path, columns, stored in rows:
            member = Member(*json.loads(stored)) if stored else None
            entries.append(Entry(os.fsdecode(path), json.loads(columns), member))
        return entries

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
        insert = "INSERT OR IGNORE INTO images (path, columns, section, member) VALUES (?, ?, ?, ?)"
        for path, row, member, _ in entries:
            columns |= dict.fromkeys(row)
            section, stored = row.get(group_by or "", ""), json.dumps(member) if member else None
            values = os.fsencode(path), json.dumps(dict(row)), section, stored
            self.repeated += self._rows.execute(insert, values).rowcount == 0
        if group_by is not None:
            self._sort_groups(group_by, list(columns))
        self.columns, self.unused = list(columns), unused
        facts = {"columns": self.columns, "unused": unused, "repeated": self.repeated}
        stated = ((name, json.dumps(value)) for name, value in facts.items())
        self._rows.executemany("INSERT INTO facts VALUES (?, ?)", stated)
        self._rows.commit()

    def _sort_groups(self, column: str, known: Sequence[str]) -> None:
        if column not in known:
            reason = f"it has {', '.join(known)}" if known else "only tables have columns"
            raise UserError(f"no column {column!r} to group by in the input: {reason}")
        self._rows.executescript(
            "CREATE TEMP TABLE unsorted AS SELECT * FROM images; DELETE FROM images;"
            "INSERT INTO images (path, columns, section, member) "
            "SELECT path, columns, section, member FROM "
            "(SELECT *, MIN(number) OVER (PARTITION BY section) AS first FROM unsorted) "
            "ORDER BY first, number; DROP TABLE unsorted;"
        )

    def close(self) -> None:
        """Close the file."""
        self._rows.close()


Source = Any  # a path or URL of images or of a table, or a DataFrame


def list_images(
    sources: Sequence[Source],
    database: Path | str = ":memory:",
    stdin: Path | None = None,
    group_by: str | None = None,
) -> ImageList:
    """List the images of folders, image files, tar shards, and tables with a path column.

    Each may be a URL (:mod:`cliquetta.data.remote`), a table also a DataFrame. A file that is
    named itself counts as an image whatever its suffix. Paths in a CSV, TSV or Parquet file count
    from its folder; its columns are copied. ``shard-{000..012}.tar`` stands for thirteen tar files.
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
    url, name = is_url(source), str(source)
    suffix = posixpath.splitext(name)[1].lower()
    is_folder = find_filesystem(name)[0].isdir if url else os.path.isdir
    if suffix == TAR:
        for shard in expand_braces(name):
            require_exists(shard)
            yield from (Entry(f"{shard}/{inner}", {}, at) for inner, at in list_members(shard))
    elif suffix in TABLES and (url or not is_folder(source)):
        yield from _listed(name)
    elif is_folder(source):
        images = walk_urls(name, unused) if url else map(str, walk_images(Path(source), unused))
        image = None
        for image in images:
            yield Entry(image, {})
        if image is None:
            raise no_images(source)
    else:
        require_exists(source)
        if suffix in _PACKED:
            remedy = "unpack it and name the folder, or make it a .tar file"
            raise UserError(f"{source} is compressed: {remedy}")
        yield Entry(name, {})


def _listed(table: str) -> Iterator[Entry]:
    """The images that a table names; relative paths count from its folder."""
    folder = table.rpartition("/")[0] if is_url(table) else os.fspath(Path(table).parent)
    with open_table(table) as (column, rows):
        for row in rows:
            path = row[column].strip()
            if is_url(table):
                path = join_url(folder, path)
            elif not is_url(path):
                path = os.fspath(Path(folder) / path)
            yield Entry(path, {name.strip(): value or "" for name, value in row.items() if name})


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Paths of a list, separated by NUL if there is one in its first block, else by line."""
    separator, rest = b"\0" if b"\0" in file.read(_BLOCK) else b"\n", b""
    file.seek(0)
    while block := file.read(_BLOCK):
        *complete, rest = (rest + block).split(separator)
        yield from (line for part in complete if (line := part.rstrip(b"\r\n")))
    if last := rest.rstrip(b"\r\n"):
        yield last


def digest(sources: Sequence[Source], stdin: Path | None) -> str:
    """Hash of the sources and of the content of lists; the content of folders does not count."""
    names = [s.to_csv() if is_table(s) else os.fspath(s) for s in sources]
    total = hashlib.sha256(json.dumps(names).encode())
    tables = [s for s in sources if not is_table(s) and str(s).lower().endswith(TABLES)]
    files = [s for s in tables if is_url(s) or Path(s).is_file()]
    for path in [*files, *([stdin] if stdin else [])]:
        with naming(path), open_location(path) as file:
            while block := file.read(_BLOCK):
                total.update(block)
    return total.hexdigest()[:16]
