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
LabelOf = Callable[
    [str], int | None
]  # the label of a folder or class name, if it has one
AnyArray = npt.NDArray[Any]
Rows = Iterable[tuple[str, str]]  # key and class of the images that a list names
RowsOf = Callable[
    [str, Location, Path], Rows
]  # of a class list: reads the list of a location


def by_wnid(list_id: str) -> LabelOf:
    """Folders named by WordNet id, whatever subset of ImageNet they are."""
    return {wnid: label for label, wnid in enumerate(wnids(list_id))}.get


def by_wnid_or_number(list_id: str) -> LabelOf:
    """Folders named by WordNet id or by number: sorted as strings, 10 would come before 2."""
    label_of, count = by_wnid(list_id), len(wnids(list_id))
    return lambda name: (
        int(name) if name.isdecimal() and int(name) < count else label_of(name)
    )


def by_name(list_id: str, rule: Callable[[str], str] = squeeze) -> LabelOf:
    """Folders named by class; what ``rule`` makes equal is the same name."""
    labels = {rule(name): label for label, name in enumerate(class_names(list_id))}
    return lambda name: labels.get(rule(name))


def words(name: str) -> str:
    """The words of a name in alphabetical order (cars: the year comes first or last)."""
    return " ".join(sorted(re.findall(r"[^\W_]+", name.lower())))


def class_folders(label_of: LabelOf, *, hint: str = "") -> Read:
    """One folder per class. A folder that is no class is refused: labels would shift unseen."""

    def read(location: Location) -> Listing:
        pictures: list[tuple[int, Path]] = []
        for folder in sorted(
            location.images.iterdir(), key=lambda path: natural_key(path.name)
        ):
            if not folder.is_dir() or folder.name.startswith((".", "__")):
                continue
            label = label_of(folder.name)
            if label is None:
                raise UserError(
                    f"{folder} is not one of the classes{hint and '; '}{hint}"
                )
            pictures += [(label, path) for path in walk_images(folder)]
        pictures.sort(
            key=lambda picture: picture[0]
        )  # stable: natural order within a class
        paths = [path for _, path in pictures]
        keys = [path.relative_to(location.images).as_posix() for path in paths]
        return Listing(keys, [label for label, _ in pictures], paths)

    return read


def several(list_id: str, domains: Mapping[str, Sequence[str]]) -> Read:
    """Class folders of one domain, or of all in a row; each domain may have several names."""
    read_one = class_folders(by_name(list_id))

    def read(location: Location) -> Listing:
        keys, labels, paths = list[str](), list[int](), list[Path]()
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
    """Pictures on disk that a side file names, each once; below any folder if ``anywhere``."""

    def read(location: Location) -> Listing:
        assert location.file is not None, "layouts with a list name its file"
        labels: dict[str, int] = {}
        rows = list(rows_of(list_id, location, location.file))
        for key, stated in rows:
            label = label_of(stated)
            if label is None:
                classes = f"the classes{hint and '; '}{hint}"
                raise UserError(
                    f"{location.file}: {stated!r} of {key} is not one of {classes}"
                )
            labels[key] = label
        paths = {key: location.images / key for key in labels}
        if anywhere:
            by_file_name = {path.name: path for path in walk_images(location.images)}
            paths = {
                key: by_file_name.get(path.name, path) for key, path in paths.items()
            }
        folders = {
            path.parent for path in paths.values()
        }  # one look at each, not one per file
        there = {
            path for folder in folders if folder.is_dir() for path in folder.iterdir()
        }
        keys = [key for key, path in paths.items() if path in there]
        repeated = len(rows) - len(labels)
        notes = (
            (f"{repeated} files are listed twice and counted once",) if repeated else ()
        )
        numbers, files = [labels[key] for key in keys], [paths[key] for key in keys]
        return Listing(
            keys, numbers, files, missing=len(labels) - len(keys), notes=notes
        )

    return read


def each_line(parse: Callable[[str], tuple[str, str]]) -> RowsOf:
    """One image per line, whose key and class ``parse`` reads from it."""
    return lambda list_id, location, file: map(parse, text_lines(file))


def coop_rows(list_id: str, location: Location, file: Path) -> Rows:
    """A split of CoOp, ``{split: [[path, label, name], ...]}``, held against our class list."""
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
    names = class_names(list_id)
    for key, label, name in pictures:
        known = names[label] if 0 <= label < len(names) else "no class"
        if squeeze(known) != squeeze(name):
            ours = (
                f"our list calls it {known!r}; is it the split file of another dataset?"
            )
            raise UserError(f"{file} calls class {label} {name!r}, {ours}")
        yield key, name


def numbered_rows(list_id: str, location: Location, file: Path) -> Rows:
    """Lines ``domain/class/file label``; the folder's name must be that of the label."""
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
    """Images (N, 32, 32, 3) of a split, called by their numbers."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(
        class_names(list_id)
    ):
        raise UserError(
            f"{location.images} holds no labels of {list_id} for {location.split}"
        )
    keys = [f"{location.split}/{number:0{digits}d}" for number in range(len(images))]
    pictures = np.ascontiguousarray(images, dtype=np.uint8)
    return Listing(keys, labels.astype(int).tolist(), images=pictures)


def cifar_pickles(list_id: str, field: str, parts: Mapping[str, Sequence[str]]) -> Read:
    """CIFAR for Python: dicts of rows of pixels, labels (called ``field``) and file names."""
    names = [
        name.replace(" ", "_") for name in class_names(list_id)
    ]  # as PNG copies spell them

    def read(location: Location) -> Listing:
        batches = [_unpickle(location.images / name) for name in parts[location.split]]
        labels = [int(label) for batch in batches for label in batch[field]]
        files = [str(name) for batch in batches for name in batch["filenames"]]
        rows = np.concatenate(
            [np.asarray(batch["data"], np.uint8) for batch in batches]
        )
        keys = [
            f"{names[label]}/{file}" for label, file in zip(labels, files, strict=True)
        ]
        return Listing(keys, labels, images=np.ascontiguousarray(_pictures(rows)))

    return read


def cifar_records(list_id: str, lead: int, parts: Mapping[str, Sequence[str]]) -> Read:
    """CIFAR's binary files: records of ``lead`` bytes, the last the label, and 3,072 of pixels."""

    def read(location: Location) -> Listing:
        files = [location.images / f"{name}.bin" for name in parts[location.split]]
        raw = np.concatenate(
            [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
        )
        if len(raw) % (lead + _PIXELS):
            raise UserError(f"{files[0]} is cut off: its records are not complete")
        records = raw.reshape(-1, lead + _PIXELS)
        pictures = _pictures(records[:, lead:])
        return numbered_arrays(location, pictures, records[:, lead - 1], list_id)

    return read


def _pictures(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(N, 32, 32, 3) of rows of 1,024 red, then green, then blue values."""
    return rows.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)


def load_pair(images: Path, labels: Path) -> tuple[AnyArray, AnyArray]:
    """Array files of pictures (N, 32, 32, 3) and their labels; nothing in them is executed."""
    for path in (images, labels):
        if not path.is_file():
            raise UserError(f"no {path.name} in {path.parent}")
    try:
        pictures, classes = (
            np.load(path, allow_pickle=False) for path in (images, labels)
        )
    except ValueError as error:
        raise UserError(
            f"{images} or {labels.name} is no array file ({error})"
        ) from None
    if pictures.shape[1:] != (_SIDE, _SIDE, 3) or classes.shape != pictures.shape[:1]:
        shapes = f"{pictures.shape} and {classes.shape}"
        wanted = f"pictures (N, {_SIDE}, {_SIDE}, 3) and N labels are wanted"
        raise UserError(f"{images} and {labels.name} have shapes {shapes}: {wanted}")
    return pictures, classes


class _ArraysOnly(pickle.Unpickler):
    """Unpickles dicts, lists and numpy arrays; a file that asks for more is refused."""

    def find_class(self, module: str, name: str) -> Any:
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
    with path.open("rb") as file:
        try:
            return dict(_ArraysOnly(file, encoding="latin1").load())
        except Exception as error:  # a damaged pickle raises errors of every kind
            raise UserError(f"{path} is not a batch of CIFAR ({error})") from None
