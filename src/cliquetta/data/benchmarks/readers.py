"""Readers of the layouts of datasets: class folders, lists, arrays and CIFAR's own formats."""

import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cliquetta.data.benchmarks.benchmark import Listing, Location, squeeze
from cliquetta.data.files import walk_images
from cliquetta.data.images import natural_key
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import class_names, text_lines, wnids

Read = Callable[[Location], Listing]
# The label of a folder or class name, if it has one.
LabelOf = Callable[[str], int | None]
AnyArray = npt.NDArray[Any]
# Key and class of the images that a list names.
Rows = Iterable[tuple[str, str]]
# Reads the list of a location, for a class list.
RowsOf = Callable[[str, Location, Path], Rows]


def by_wnid(list_id: str) -> LabelOf:
    """Label folders named by WordNet id, whatever subset of ImageNet they are."""
    return {wnid: label for label, wnid in enumerate(wnids(list_id))}.get


def by_wnid_or_number(list_id: str) -> LabelOf:
    """Label folders named by WordNet id or by number: sorted as strings, 10 is before 2."""
    label_of_wnid = by_wnid(list_id)
    count = len(wnids(list_id))

    def label_of(name: str) -> int | None:
        if name.isdecimal() and int(name) < count:
            return int(name)
        return label_of_wnid(name)

    return label_of


def by_name(list_id: str, rule: Callable[[str], str] = squeeze) -> LabelOf:
    """Label folders named by class; what ``rule`` makes equal is the same name."""
    labels = {rule(name): label for label, name in enumerate(class_names(list_id))}
    return lambda name: labels.get(rule(name))


def words(name: str) -> str:
    """Sort the words of a name (cars: the year comes first or last)."""
    return " ".join(sorted(re.findall(r"[^\W_]+", name.lower())))


def class_folders(label_of: LabelOf, *, hint: str = "") -> Read:
    """Read one folder per class. One that is no class is refused: labels would shift unseen."""

    def read(location: Location) -> Listing:
        folders = sorted(
            location.images.iterdir(), key=lambda path: natural_key(path.name)
        )
        pictures: list[tuple[int, Path]] = []
        for folder in folders:
            if not folder.is_dir() or folder.name.startswith((".", "__")):
                continue

            label = label_of(folder.name)
            if label is None:
                raise UserError(
                    f"{folder} is not one of the classes{hint and '; '}{hint}"
                )
            pictures += [(label, path) for path in walk_images(folder)]

        # The sort is stable: natural order within a class.
        pictures.sort(key=lambda picture: picture[0])

        paths = [path for _, path in pictures]
        keys = [path.relative_to(location.images).as_posix() for path in paths]
        return Listing(keys, [label for label, _ in pictures], paths)

    return read


def several(list_id: str, domains: Mapping[str, Sequence[str]]) -> Read:
    """Read class folders of one domain, or of all; each domain may have several names."""
    read_one = class_folders(by_name(list_id))

    def read(location: Location) -> Listing:
        keys = []
        labels: list[int] = []
        paths: list[Path] = []

        # Domains that are not there are left out.
        for split in domains if location.split == "all" else [location.split]:
            candidates = (location.images / name for name in domains[split])
            path = next((path for path in candidates if path.is_dir()), None)
            if path is not None:
                one = read_one(Location(path, split))
                keys += [f"{split}/{key}" for key in one.keys]
                labels += one.labels
                paths += one.paths
        return Listing(keys, labels, paths)

    return read


def from_list(
    list_id: str, rows_of: RowsOf, label_of: LabelOf, *, hint: str, anywhere: bool
) -> Read:
    """Read pictures that a side file names, each once; below any folder if ``anywhere``."""

    def read_labels(location: Location) -> tuple[dict[str, int], int]:
        """Return labels by key, and how many files are listed again."""
        assert location.file is not None, "layouts with a list name its file"
        labels: dict[str, int] = {}
        rows = list(rows_of(list_id, location, location.file))
        for key, stated in rows:
            label = label_of(stated)
            if label is None:
                raise UserError(
                    f"{location.file}: {stated!r} of {key} is not one of the classes"
                    f"{hint and '; '}{hint}"
                )
            labels[key] = label
        return labels, len(rows) - len(labels)

    def read(location: Location) -> Listing:
        labels, repeated = read_labels(location)
        paths = {key: location.images / key for key in labels}
        if anywhere:
            by_file_name = {path.name: path for path in walk_images(location.images)}
            for key, path in paths.items():
                paths[key] = by_file_name.get(path.name, path)

        # One look at each folder, not one per file.
        present: set[Path] = set()
        for folder in {path.parent for path in paths.values()}:
            if folder.is_dir():
                present.update(folder.iterdir())
        keys = [key for key, path in paths.items() if path in present]

        notes = (f"{repeated} files are listed twice and counted once",)
        return Listing(
            keys,
            labels=[labels[key] for key in keys],
            paths=[paths[key] for key in keys],
            missing=len(labels) - len(keys),
            notes=notes if repeated else (),
        )

    return read


def each_line(parse: Callable[[str], tuple[str, str]]) -> RowsOf:
    """Read one image per line, whose key and class ``parse`` reads from it."""
    return lambda list_id, location, file: map(parse, text_lines(file))


def coop_rows(list_id: str, location: Location, file: Path) -> Rows:
    """Read a split of CoOp, ``{split: [[path, label, name], ...]}``; check it by our class list."""
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))[location.split]
        pictures = [(str(key), int(label), str(name)) for key, label, name in listed]
    except KeyError:
        raise UserError(f"{file} has no split {location.split!r}") from None
    except (ValueError, TypeError):
        raise UserError(
            f"{file} is not a split file of CoOp (JSON of [path, label, class name]); "
            "was it downloaded completely?"
        ) from None

    # A split file of another dataset would shift labels unseen.
    names = class_names(list_id)
    for key, label, name in pictures:
        ours = names[label] if 0 <= label < len(names) else "no class"
        if squeeze(ours) != squeeze(name):
            raise UserError(
                f"{file} calls class {label} {name!r}, our list calls it {ours!r}; "
                "is it the split file of another dataset?"
            )
        yield key, name


def numbered_rows(list_id: str, location: Location, file: Path) -> Rows:
    """Read lines ``domain/class/file label``; the folder's name must be that of the label."""
    label_of = by_name(list_id)
    for line in text_lines(file):
        key, _, number = line.rpartition(" ")
        name = Path(key).parent.name

        if not number.isdecimal() or label_of(name) != int(number):
            raise UserError(f"{file}: {line!r} contradicts our class list of {list_id}")
        yield key, name


# --- arrays and CIFAR's formats -----------------------------------------------------------------

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


def numbered_arrays(
    location: Location,
    images: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    list_id: str,
    digits: int = 5,
) -> Listing:
    """List images (N, 32, 32, 3) of a split, called by their numbers."""
    classes = len(class_names(list_id))

    # Labels of another class list would be accepted unseen.
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise UserError(
            f"{location.images} holds no labels of {list_id} for {location.split}"
        )
    keys = [f"{location.split}/{number:0{digits}d}" for number in range(len(images))]

    pictures = np.ascontiguousarray(images, dtype=np.uint8)
    return Listing(keys, labels.astype(int).tolist(), images=pictures)


def cifar_pickles(list_id: str, field: str, parts: Mapping[str, Sequence[str]]) -> Read:
    """Read CIFAR for Python: dicts of rows of pixels, labels (called ``field``) and file names."""
    # As PNG copies spell them.
    names = [name.replace(" ", "_") for name in class_names(list_id)]

    def read(location: Location) -> Listing:
        keys = []
        labels = []
        rows = []

        # Batch after batch, as the files number them.
        for part in parts[location.split]:
            batch = _unpickle(location.images / part)
            rows.append(np.asarray(batch["data"], np.uint8))
            for label, file in zip(batch[field], batch["filenames"], strict=True):
                keys.append(f"{names[int(label)]}/{file}")
                labels.append(int(label))
        pictures = _pictures(np.concatenate(rows))
        return Listing(keys, labels, images=np.ascontiguousarray(pictures))

    return read


def cifar_records(list_id: str, lead: int, parts: Mapping[str, Sequence[str]]) -> Read:
    """Read CIFAR's binary files: ``lead`` bytes, the last the label, and 3,072 of pixels."""
    size = lead + _PIXELS

    def read(location: Location) -> Listing:
        # All files of the split, one behind the other.
        files = [location.images / f"{name}.bin" for name in parts[location.split]]
        content = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
        values = np.concatenate(content)

        if len(values) % size:
            raise UserError(f"{files[0]} is cut off: its records are not complete")
        records = values.reshape(-1, size)

        # The label is the last byte before the pixels.
        pictures = _pictures(records[:, lead:])
        return numbered_arrays(location, pictures, records[:, lead - 1], list_id)

    return read


def _pictures(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Make pictures (N, 32, 32, 3) of rows of 1,024 red, then green, then blue values."""
    return rows.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)


def load_pair(images: Path, labels: Path) -> tuple[AnyArray, AnyArray]:
    """Load pictures (N, 32, 32, 3) and their labels; nothing in the files is executed."""
    for path in (images, labels):
        if not path.is_file():
            raise UserError(f"no {path.name} in {path.parent}")
    try:
        pictures = np.load(images, allow_pickle=False)
        classes = np.load(labels, allow_pickle=False)
    except ValueError as error:
        raise UserError(
            f"{images} or {labels.name} is no array file ({error})"
        ) from None
    if pictures.shape[1:] != (_SIDE, _SIDE, 3) or classes.shape != pictures.shape[:1]:
        raise UserError(
            f"{images} and {labels.name} have shapes {pictures.shape} and "
            f"{classes.shape}: pictures (N, {_SIDE}, {_SIDE}, 3) and N labels are wanted"
        )
    return pictures, classes


class _ArraysOnly(pickle.Unpickler):
    """Unpickles dicts, lists and numpy arrays; a file that asks for more is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that arrays need; refuse all others."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


_RECONSTRUCT = np.zeros(0).__reduce__()[0]  # wherever this version of numpy keeps it
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): str.encode,  # how Python 3 writes bytes into old pickles
}


def _unpickle(path: Path) -> dict[str, Any]:
    """Read a batch of CIFAR for Python; nothing in it is executed."""
    with path.open("rb") as file:
        try:
            return dict(_ArraysOnly(file, encoding="latin1").load())
        except Exception as error:  # a damaged pickle raises errors of every kind
            raise UserError(f"{path} is not a batch of CIFAR ({error})") from None
