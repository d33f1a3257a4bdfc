"""Your own files as datasets: folders of images, and tables of paths."""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from PIL import Image

from cliquetta.data.dataset import OUTSIDE, UNKNOWN, Dataset, FileDataset, UInt8Array
from cliquetta.data.images import EXTENSIONS, natural_key
from cliquetta.data.remote import is_url, open_location, require_exists
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import text_lines
from cliquetta.prompts.classes import DEFAULT_TEMPLATE
from cliquetta.prompts.features import FloatArray

CLASS_FILES = ("classnames.txt", "classes.txt", "class_names.txt", "labels.txt")
TEMPLATE_FILES = ("zeroshot_classification_templates.txt", "templates.txt")
PATH_COLUMNS = ("path", "file", "filename", "filepath", "file_name", "image")
LABEL_COLUMNS = ("class", "label", "class_name", "category", "target")
PARQUET = ".parquet"


class NoClassNamesError(UserError):
    """Images whose classes have no names."""


def walk_images(folder: Path, unused: Counter[str] | None = None) -> Iterator[Path]:
    """Yield images under ``folder`` in natural order, links once; ``unused`` counts other files."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    unused = Counter() if unused is None else unused

    # Folders by device and number: a link may lead back to one.
    seen: set[tuple[int, int]] = set()

    # One iterator for each level that is open.
    pending = [iter([folder])]
    while pending:
        path = next(pending[-1], None)
        if path is None:
            pending.pop()
        elif path != folder and path.name.startswith("."):
            unused["hidden"] += 1
        elif path.is_dir():
            status = path.stat()
            if (status.st_dev, status.st_ino) in seen:
                unused["folders reached twice by links"] += 1
                continue
            seen.add((status.st_dev, status.st_ino))
            try:
                pending.append(iter(_list_folder(path)))
            except OSError:
                unused["unreadable folders"] += 1
        elif path.suffix.lower() in EXTENSIONS and path.is_file():
            yield path
        else:
            unused[path.suffix.lower() or "no suffix"] += 1


def _list_folder(folder: Path) -> list[Path]:
    """List a folder in natural order; a folder in it sorts as the paths below it do."""
    with os.scandir(folder) as entries:
        keys = {
            entry.name: f"{entry.name}/" if entry.is_dir() else entry.name
            for entry in entries
        }
    names = sorted(keys, key=lambda name: natural_key(keys[name]))
    return [folder / name for name in names]


def find_images(folder: Path) -> list[Path]:
    """List all images under ``folder``; refuse a folder without any."""
    paths = list(walk_images(folder))
    if not paths:
        raise no_images(folder)
    return paths


def no_images(source: Path | str) -> UserError:
    """Return an error that says what was looked for."""
    return UserError(
        f"no images in {source} (looked for {', '.join(sorted(EXTENSIONS))})"
    )


def folder_dataset(folder: Path, names: Sequence[str] | None = None) -> FileDataset:
    """Read a folder of images; its sub-folders are their classes, a flat one needs class names."""
    paths = find_images(folder)
    keys = [path.relative_to(folder).as_posix() for path in paths]
    names = names or read_beside(CLASS_FILES, folder)
    labels = None

    # The first part of a key is a class, unless it is the image itself.
    loose = [key for key in keys if "/" not in key]
    if len(loose) < len(keys):
        if loose:
            raise UserError(
                f"{folder} has class folders and loose images ({loose[0]}); move those"
            )
        stated = [key.partition("/")[0].replace("_", " ") for key in keys]
        names, labels = number_labels(
            stated, names, f"folders of {folder}", numeric=False
        )

    if names is None:
        raise NoClassNamesError(
            f"{folder} has no sub-folders to name its classes: "
            f"give class names (--classes, or {CLASS_FILES[0]} in it)"
        )
    return FileDataset(
        f"folder:{folder.as_posix()}", paths, names=names, keys=keys, labels=labels
    )


@contextmanager
def open_table(table: Path | str) -> Iterator[tuple[str, Iterator[Mapping[str, str]]]]:
    """Open a CSV, TSV or Parquet file or URL: its column of paths, and its rows that have one."""
    require_exists(table)
    name = str(table)
    if not is_url(table) and Path(table).is_dir():
        raise UserError(
            f"{name} is a folder, expected a table of paths: write folder:{name}"
        )

    with open_location(table) as file:
        if name.lower().endswith(PARQUET):
            columns, rows = _parquet_rows(file, name)
            path = path_column(columns, name)
            yield path, (row for row in rows if row[path].strip())
            return

        delimiter = "\t" if name.lower().endswith((".tsv", ".tab")) else ","
        try:
            text = io.TextIOWrapper(file, newline="", encoding="utf-8-sig")
            # A NUL would end the reader.
            lines = (line.replace("\0", "\ufffd") for line in text)
            reader = csv.DictReader(lines, delimiter=delimiter, restval="")
            path = path_column(reader.fieldnames or (), name)
            yield path, (row for row in reader if row[path].strip())
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{name} is not a table in UTF-8 ({error})") from None


def _parquet_rows(
    file: BinaryIO, name: str
) -> tuple[Sequence[str], Iterator[dict[str, str]]]:
    """Open a Parquet file: its columns, and its rows as texts."""
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(
            "Parquet files need an extra: pip install 'cliquetta[parquet]'"
        ) from None
    try:
        opened = ParquetFile(file)
    except ArrowInvalid as error:
        raise UserError(f"{name} is not a Parquet file ({error})") from None
    rows = (row for batch in opened.iter_batches(10_000) for row in batch.to_pylist())
    texts = (
        {column: "" if value is None else str(value) for column, value in row.items()}
        for row in rows
    )
    return opened.schema_arrow.names, texts


def path_column(columns: Sequence[str], table: str) -> str:
    """Find the column of paths of a table."""
    column = find_column(columns, PATH_COLUMNS)
    if column is None:
        raise UserError(
            f"{table} has no column of paths: name one of its columns "
            f"{' or '.join(PATH_COLUMNS)}; it has {', '.join(columns)}"
        )
    return column


def find_column(columns: Sequence[str], wanted: Sequence[str]) -> str | None:
    """Find the first of ``wanted`` that is a column, whatever its case."""
    spelling = {name.strip().lower(): name for name in columns}
    for name in wanted:
        if name in spelling:
            return spelling[name]
    return None


def table_dataset(table: Path, names: Sequence[str] | None = None) -> FileDataset:
    """Read the images that a table names, from its folder; classes, if any, as names or numbers.

    Class list and templates default to ``classnames.txt`` and ``templates.txt`` beside
    the table.
    """
    # The class of each path, in the order of the table.
    stated: dict[str, str | None] = {}
    with open_table(table) as (column, rows):
        for row in rows:
            path = row[column].strip()
            label = find_column(list(row), LABEL_COLUMNS)
            value = (row[label].strip() or None) if label else None
            if stated.setdefault(path, value) != value:
                raise UserError(f"{table} names {path} twice, with different classes")
    if not stated:
        raise UserError(f"{table} lists no images")

    folder = table.parent
    names = names or read_beside(CLASS_FILES, folder)
    names, labels = number_labels(list(stated.values()), names, str(table))
    return FileDataset(
        f"csv:{table.as_posix()}",
        [folder / path for path in stated],
        names=names,
        keys=list(stated),
        labels=labels,
        templates=read_beside(TEMPLATE_FILES, folder) or (DEFAULT_TEMPLATE,),
    )


def read_beside(names: Sequence[str], *folders: Path) -> tuple[str, ...] | None:
    """Read the lines of the first text file of some names and folders, if there is one."""
    for folder in folders:
        for name in names:
            path = folder / name
            if path.is_file():
                return tuple(text_lines(path))
    return None


def number_labels(
    stated: Sequence[str | None],
    names: Sequence[str] | None,
    source: str,
    *,
    numeric: bool = True,
) -> tuple[tuple[str, ...], list[int] | None]:
    """Return the class list, and a label for each of ``stated``.

    These are names, or numbers if ``numeric``. Without ``names`` classes are in natural
    order. Labels are ``None`` if nothing is stated.
    """
    values = {value for value in stated if value is not None}
    are_numbers = numeric and all(value.isdecimal() for value in values)
    if names is None:
        if are_numbers or not values:
            what = "labels are numbers" if values else "there are no labels"
            raise NoClassNamesError(
                f"{source}: {what}, so the classes have no names: write them, one per "
                f"line, into {CLASS_FILES[0]} beside it, or give --classes"
            )
        names = sorted(values, key=natural_key)
    names = tuple(names)
    if not values:
        return names, None

    number = {same_name(name): label for label, name in enumerate(names)}
    if are_numbers:
        number = {str(label): label for label in range(len(names))}
    labels = []
    for value in stated:
        if value is None:
            labels.append(UNKNOWN)
            continue
        name = str(int(value)) if are_numbers else value
        label = number.get(same_name(name))
        if label is None:
            listed = f"the class list of {len(names)} names"
            raise UserError(f"{source}: class {name!r} is not in {listed}")
        labels.append(label)
    return names, labels


def same_name(name: str) -> str:
    """Return a class name as names are compared: without case, underscores and outer blanks."""
    return name.strip().replace("_", " ").lower()


Keep = Literal["all", "inside", "outside"]


class RelabelledDataset(Dataset):
    """``base`` among another class list, matched by name.

    ``keep`` chooses images for an open set: those of classes inside the list, or those
    outside, labelled :data:`OUTSIDE`. ``"all"`` wants every class of the base to be in
    the list.
    """

    def __init__(self, base: Dataset, names: Sequence[str], keep: Keep = "all") -> None:
        # The class of every image, by its name.
        classes: list[str | None] = [None] * len(base)
        if base.labels is not None:
            labels = base.labels.tolist()
            classes = [base.names[n] if n >= 0 else None for n in labels]

        self.rows = list(range(len(base)))
        if keep != "all":
            listed = set(map(same_name, names))
            inside = [
                name is not None and same_name(name) in listed for name in classes
            ]
            self.rows = [row for row in self.rows if inside[row] == (keep == "inside")]

        if not self.rows:
            raise UserError(f"{base.id} has no images of classes {keep} the class list")

        relabelled: list[int] | None = [OUTSIDE] * len(self.rows)
        if keep != "outside":
            stated = [classes[row] for row in self.rows]
            _, relabelled = number_labels(stated, names, base.id)

        super().__init__(
            base.id,
            names=names,
            keys=[base.keys[row] for row in self.rows],
            labels=relabelled,
            templates=base.templates,
        )
        self.base = base
        self.keep = keep

    def load(self, index: int) -> Image.Image:
        """Load image ``index`` in RGB."""
        return self.base.load(self.rows[index])

    def arrays(self, indices: Sequence[int]) -> UInt8Array | None:
        """Return images (n, H, W, 3) of a base in memory."""
        return self.base.arrays([self.rows[index] for index in indices])

    def features(self, indices: Sequence[int]) -> FloatArray | None:
        """Return unit features (n, V, E) of a base that holds these."""
        return self.base.features([self.rows[index] for index in indices])

    def redrawn(self, round: int) -> "RelabelledDataset":
        """Return the same images of the base as it is in a later round."""
        if not round:
            return self
        return RelabelledDataset(self.base.redrawn(round), self.names, self.keep)

    def contents(self) -> str:
        """Describe the contents of the base."""
        return self.base.contents()
