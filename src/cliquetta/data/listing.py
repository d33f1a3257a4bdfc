"""Images of a long prediction run, listed in order, each once, in an SQLite file.

A run that is continued sees the same images under the same numbers; memory does not
grow.
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
from cliquetta.data.files import (
    PARQUET,
    no_images,
    open_table,
    path_column,
    walk_images,
)
from cliquetta.data.inputs import ImageLike, is_table, to_picture
from cliquetta.data.labels import FOLDER, last_folder
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
    """Image of a list."""

    # A local path, a URL, or those of a tar file with the name of one of its
    # members.
    path: str
    columns: Mapping[str, str]
    member: Member | None = None
    # One in memory, which ``path`` names.
    image: ImageLike | None = None
    # Below the folder or in the tar file that was named; else the last one.
    folder: str = ""
    # As it is stated, where labels were asked for.
    label: str = ""


class _Pictures(Dataset):
    """Images in memory, or paths among these."""

    def __init__(self, paths: Sequence[str], images: Sequence[ImageLike]) -> None:
        super().__init__("images", names=(), keys=paths, labels=None)
        self.images = images

    def load(self, index: int) -> Image.Image:
        """Load image ``index`` in RGB."""
        _, picture = to_picture(self.images[index])
        return picture


def find_listed(entries: Sequence[Entry], *, shorter: int | None) -> list[ImageGroup]:
    """Group images of a list, for a loader."""
    paths = [entry.path for entry in entries]
    rows = range(len(entries))
    images = [entry.image for entry in entries if entry.image is not None]
    dataset: Dataset
    if images:
        dataset = _Pictures(paths, images)
    else:
        dataset = FileDataset(
            "list",
            paths,
            names=(),
            labels=None,
            members=[entry.member for entry in entries],
            shorter=shorter,
        )
    return [ImageGroup(dataset, rows, paths, rows)]


class ImageList:
    """Opened list; build one with :func:`list_images`."""

    def __init__(self, database: Path | str) -> None:
        self._rows = sqlite3.connect(database, check_same_thread=False)
        self._rows.executescript(
            "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);"
            "CREATE TABLE IF NOT EXISTS images (number INTEGER PRIMARY KEY, path BLOB UNIQUE, "
            "columns TEXT, section TEXT, member TEXT, folder TEXT, label TEXT);"
            # where the order is not that of the list: whose turn it is, counted from 1
            "CREATE TABLE IF NOT EXISTS turns (turn INTEGER PRIMARY KEY, number INTEGER)"
        )
        facts = dict(self._rows.execute("SELECT name, value FROM facts"))
        # Of input tables.
        self.columns: list[str] = json.loads(facts.get("columns", "[]"))
        # Files in folders that are no images, counted by kind.
        self.unused: Counter[str] = Counter(json.loads(facts.get("unused", "{}")))
        # How many paths were named again.
        self.repeated = int(facts.get("repeated", 0))
        first_turn = self._rows.execute("SELECT 1 FROM turns LIMIT 1").fetchone()
        self.shuffled = first_turn is not None

    def __len__(self) -> int:
        return int(self._rows.execute("SELECT COUNT(*) FROM images").fetchone()[0])

    def entries(self, start: int, stop: int) -> list[Entry]:
        """Return the images whose turns are from ``start`` up to ``stop``, counted from 0."""
        source = "images"
        turn = "number"
        if self.shuffled:
            source = "turns JOIN images USING (number)"
            turn = "turn"
        rows = self._rows.execute(
            f"SELECT path, columns, member, folder, label FROM {source} "
            f"WHERE {turn} BETWEEN ? AND ? ORDER BY {turn}",
            (start + 1, stop),
        )
        entries = []
        for path, columns, stored, folder, label in rows:
            entry = Entry(
                path=os.fsdecode(path),
                columns=json.loads(columns),
                member=Member(*json.loads(stored)) if stored else None,
                folder=folder,
                label=label,
            )
            entries.append(entry)
        return entries

    def numbers(self, start: int, stop: int) -> Iterator[int]:
        """Yield the numbers of images whose turns are from ``start`` up to ``stop``."""
        if not self.shuffled:
            yield from range(start, stop)
            return
        rows = self._rows.execute(
            "SELECT number FROM turns WHERE turn BETWEEN ? AND ? ORDER BY turn",
            (start + 1, stop),
        )
        for (number,) in rows:
            yield number - 1

    def folders(self) -> Iterator[str]:
        """Yield the folders of all images, in the order of the list."""
        for (folder,) in self._rows.execute(
            "SELECT folder FROM images ORDER BY number"
        ):
            yield folder

    def labels(self) -> Counter[str]:
        """Count how often every label is stated."""
        counts = self._rows.execute("SELECT label, COUNT(*) FROM images GROUP BY label")
        return Counter(dict(counts))

    def shuffle(self, sections: Sequence[tuple[int, int]], seed: int) -> None:
        """Give the images of every section their turns in a random order.

        Sections are ranges of numbers that cover the part of the list which is read. An
        image's place depends on the seed and its number; nothing is held in memory.
        """

        def draw(number: int) -> bytes:
            return hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()

        self._rows.create_function("draw", 1, draw, deterministic=True)
        for start, stop in sections:
            self._rows.execute(
                "INSERT INTO turns (turn, number) "
                "SELECT ? + ROW_NUMBER() OVER (ORDER BY draw(number), number), number "
                "FROM images WHERE number BETWEEN ? AND ?",
                (start, start + 1, stop),
            )
        self._rows.commit()
        self.shuffled = True

    @property
    def in_memory(self) -> bool:
        """Whether images are on fsspec's file system in the memory of this process."""
        query = (
            "SELECT 1 FROM images WHERE path LIKE 'memory:%' "
            "OR member LIKE '%\"memory:%' LIMIT 1"
        )
        return self._rows.execute(query).fetchone() is not None

    def groups(self) -> list[tuple[str, int]]:
        """Return the values of the column that images are grouped by, with their counts."""
        return self._rows.execute(
            "SELECT section, COUNT(*) FROM images GROUP BY section ORDER BY MIN(number)"
        ).fetchall()

    def fill(
        self,
        entries: Iterator[Entry],
        unused: Counter[str],
        group_by: str | None = None,
        labels: str | None = None,
    ) -> None:
        """Store all entries, each path once; ``unused`` is counted while they are read.

        With ``group_by``, the name of a column, images with the same value there follow
        one another, groups in order of their first image. ``labels`` is the column that
        states labels, or ``folder``.
        """
        columns: dict[str, None] = {}
        insert = (
            "INSERT OR IGNORE INTO images (path, columns, section, member, folder, label) "
            "VALUES (?, ?, ?, ?, ?, ?)"
        )
        for entry in entries:
            row = entry.columns
            columns |= dict.fromkeys(row)
            values = (
                os.fsencode(entry.path),
                json.dumps(dict(row)),
                row.get(group_by or "", ""),
                json.dumps(entry.member) if entry.member else None,
                entry.folder,
                entry.folder if labels == FOLDER else row.get(labels or "", ""),
            )
            self.repeated += self._rows.execute(insert, values).rowcount == 0

        if labels is not None and labels != FOLDER:
            _require_column(labels, "of labels", list(columns))
        if group_by is not None:
            _require_column(group_by, "to group by", list(columns))
            self._sort_groups()
        self.columns = list(columns)
        self.unused = unused
        facts = {"columns": self.columns, "unused": unused, "repeated": self.repeated}
        for name, value in facts.items():
            row_of_fact = (name, json.dumps(value))
            self._rows.execute("INSERT INTO facts VALUES (?, ?)", row_of_fact)
        self._rows.commit()

    def _sort_groups(self) -> None:
        """Number images anew, one group after the other."""
        fields = "path, columns, section, member, folder, label"
        self._rows.executescript(
            "CREATE TEMP TABLE unsorted AS SELECT * FROM images; DELETE FROM images;"
            f"INSERT INTO images ({fields}) SELECT {fields} FROM "
            "(SELECT *, MIN(number) OVER (PARTITION BY section) AS first FROM unsorted) "
            "ORDER BY first, number; DROP TABLE unsorted;"
        )

    def close(self) -> None:
        """Close the file."""
        self._rows.close()


def _require_column(column: str, purpose: str, columns: Sequence[str]) -> None:
    """Refuse a column that no input table has."""
    if column in columns:
        return
    reason = f"it has {', '.join(columns)}" if columns else "only tables have columns"
    raise UserError(f"no column {column!r} {purpose} in the input: {reason}")


Source = Any  # a path or URL of images or of a table, or a DataFrame


def list_images(
    sources: Sequence[Source],
    database: Path | str = ":memory:",
    stdin: Path | None = None,
    group_by: str | None = None,
    labels: str | None = None,
) -> ImageList:
    """List the images of folders, image files, tar shards, and tables with a path column.

    Each may be a URL (:mod:`cliquetta.data.remote`), a table also a DataFrame. A file
    that is named itself counts as an image whatever its suffix. Paths in a CSV, TSV or
    Parquet file count from its folder; its columns are copied. ``shard-{000..012}.tar``
    stands for thirteen tar files. ``-`` is ``stdin``, a file of paths separated by line
    breaks or NUL characters. ``group_by`` names the column whose values the list is
    sorted by, ``labels`` the one that states labels (see :meth:`ImageList.fill`).
    """
    listing = ImageList(database)
    unused: Counter[str] = Counter()

    def entries() -> Iterator[Entry]:
        for source in sources:
            with naming(source):
                yield from _expand(source, unused, stdin)

    listing.fill(entries(), unused, group_by, labels)
    if not len(listing):
        raise UserError("no images to predict")
    return listing


def _expand(
    source: Source, unused: Counter[str], stdin: Path | None
) -> Iterator[Entry]:
    """Yield the images of one source."""
    if is_table(source):
        yield from _expand_frame(source)
        return
    if str(source) == STDIN and stdin is not None:
        with stdin.open("rb") as file:
            for line in _lines(file):
                path = os.fsdecode(line)
                yield Entry(path, {}, folder=last_folder(path))
        return
    name = str(source)

    suffix = posixpath.splitext(name)[1].lower()
    if suffix == TAR:
        yield from _expand_tar(name)
    elif suffix in TABLES and (is_url(name) or not _is_folder(name)):
        yield from _expand_table(name)
    elif _is_folder(name):
        yield from _expand_folder(name, unused)
    else:
        require_exists(source)
        if suffix in _PACKED:
            raise UserError(
                f"{source} is compressed: "
                "unpack it and name the folder, or make it a .tar file"
            )
        yield Entry(name, {}, folder=last_folder(name))


def _is_folder(name: str) -> bool:
    """Whether a path or URL is that of a folder."""
    if is_url(name):
        filesystem, _ = find_filesystem(name)
        return bool(filesystem.isdir(name))
    return os.path.isdir(name)  # noqa: PTH112 - Path raises where it may not look


def _expand_frame(frame: Any) -> Iterator[Entry]:
    """Yield the images that a DataFrame names."""
    columns = [str(name) for name in frame.columns]
    column = path_column(columns, "the DataFrame")

    # Numbers and missing values become texts, as in a CSV file.
    texts = frame.fillna("").astype(str)
    for row in texts.to_dict("records"):
        if path := row[column].strip():
            yield Entry(row[column], row, folder=last_folder(path))


def _expand_tar(name: str) -> Iterator[Entry]:
    """Yield the images of tar shards."""
    for shard in expand_braces(name):
        require_exists(shard)
        for inner, member in list_members(shard):
            folder = posixpath.dirname(inner)
            yield Entry(f"{shard}/{inner}", {}, member, folder=folder)


def _expand_folder(name: str, unused: Counter[str]) -> Iterator[Entry]:
    """Yield the images of a folder; refuse one without any."""
    if is_url(name):
        images: Iterator[str] = walk_urls(name, unused)
    else:
        images = map(str, walk_images(Path(name), unused))
    image = None
    for image in images:
        yield Entry(image, {}, folder=_folder_below(name, image))
    if image is None:
        raise no_images(name)


def _folder_below(root: str, path: str) -> str:
    """Return the folder of an image below the folder that was named."""
    if not is_url(root):
        folder = Path(path).parent.relative_to(Path(root)).as_posix()
        return "" if folder == "." else folder

    if not path.startswith(root):  # a file system may spell a URL differently
        return last_folder(path)
    return posixpath.dirname(path.removeprefix(root).lstrip("/"))


def _expand_table(table: str) -> Iterator[Entry]:
    """Yield the images that a table names; relative paths count from its folder."""
    in_store = is_url(table)
    folder = table.rpartition("/")[0] if in_store else os.fspath(Path(table).parent)
    with open_table(table) as (column, rows):
        for row in rows:
            path = row[column].strip()
            if in_store:
                path = join_url(folder, path)
            elif not is_url(path):
                path = os.fspath(Path(folder) / path)

            # Rows that are too long or too short have no name, or no value.
            columns = {name.strip(): value or "" for name, value in row.items() if name}
            yield Entry(path, columns, folder=last_folder(path))


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield paths of a list, separated by NUL if its first block has one, else by line."""
    separator = b"\0" if b"\0" in file.read(_BLOCK) else b"\n"
    rest = b""
    file.seek(0)

    # A line may go on in the next block.
    while block := file.read(_BLOCK):
        *complete, rest = (rest + block).split(separator)
        for part in complete:
            if line := part.rstrip(b"\r\n"):
                yield line
    if last := rest.rstrip(b"\r\n"):
        yield last


def digest(sources: Sequence[Source], stdin: Path | None) -> str:
    """Hash the sources and the content of lists; the content of folders does not count."""
    names = []
    read = []
    for source in sources:
        if is_table(source):
            names.append(source.to_csv())
            continue
        names.append(os.fspath(source))
        is_list = str(source).lower().endswith(TABLES)
        if is_list and (is_url(source) or Path(source).is_file()):
            read.append(source)
    if stdin is not None:
        read.append(stdin)

    total = hashlib.sha256(json.dumps(names).encode())
    for path in read:
        with naming(path), open_location(path) as file:
            while block := file.read(_BLOCK):
                total.update(block)
    return total.hexdigest()[:16]
