"""Readers of the layouts of datasets: split files, lists, class folders, CIFAR's own formats."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cliquetta.data.benchmarks.location import Listing, Location, squeeze
from cliquetta.data.files import natural_key, walk_images
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import class_names, text_lines, wnids

LabelOf = Callable[[str], int | None]
"""The label of a folder or class name, ``None`` if there is none."""


def by_wnid(list_id: str) -> LabelOf:
    """Folders named by WordNet id, whatever subset of ImageNet they are."""
    return {wnid: label for label, wnid in enumerate(wnids(list_id))}.get


def by_number(count: int) -> LabelOf:
    """Folders named 0 ... count - 1, read as numbers: sorted as strings, 10 comes before 2."""

    def label_of(name: str) -> int | None:
        return int(name) if name.isdecimal() and int(name) < count else None

    return label_of


def by_name(list_id: str) -> LabelOf:
    """Folders named by class; case and punctuation do not count."""
    labels = {squeeze(name): label for label, name in enumerate(class_names(list_id))}
    return lambda name: labels.get(squeeze(name))


def by_words(list_id: str) -> LabelOf:
    """Folders named by class with the words in any order (cars: the year first or last)."""
    labels = {_words(name): label for label, name in enumerate(class_names(list_id))}
    return lambda name: labels.get(_words(name))


def _words(name: str) -> tuple[str, ...]:
    blanks = "".join(letter if letter.isalnum() else " " for letter in name.lower())
    return tuple(sorted(blanks.split()))


def first_of(*rules: LabelOf) -> LabelOf:
    """The label by the first rule that knows the name."""

    def label_of(name: str) -> int | None:
        return next((label for rule in rules if (label := rule(name)) is not None), None)

    return label_of


def class_folders(label_of: LabelOf, *, hint: str = "") -> Callable[[Location], Listing]:
    """One folder per class. A folder that is no class is refused: labels would shift unseen."""

    def read(location: Location) -> Listing:
        pictures: list[tuple[int, str, Path]] = []
        for folder in sorted(location.images.iterdir(), key=lambda path: natural_key(path.name)):
            if not folder.is_dir() or folder.name.startswith((".", "__")):
                continue
            label = label_of(folder.name)
            if label is None:
                raise UserError(f"{folder} is not one of the classes{hint and '; '}{hint}")
            pictures += [
                (label, path.relative_to(location.images).as_posix(), path)
                for path in walk_images(folder)
            ]
        pictures.sort(key=lambda picture: picture[0])  # stable: natural order within a class
        return Listing(
            keys=[key for _, key, _ in pictures],
            labels=[label for label, _, _ in pictures],
            paths=[path for _, _, path in pictures],
        )

    return read


def several(folders: Mapping[str, Sequence[str]], list_id: str) -> Callable[[Location], Listing]:
    """One of several sets of class folders, or all of them in a row; each may have other names."""
    read_one = class_folders(by_name(list_id))

    def read(location: Location) -> Listing:
        wanted = folders if location.split == "all" else {location.split: folders[location.split]}
        found = {
            split: read_one(Location(location.root, location.folder, path, split))
            for split, names in wanted.items()
            for path in [
                location.images / name for name in names if (location.images / name).is_dir()
            ][:1]
        }
        return Listing(
            keys=[f"{split}/{key}" for split, one in found.items() for key in one.keys],
            labels=[label for one in found.values() for label in one.labels],
            paths=[path for one in found.values() for path in one.paths],
        )

    return read


def coop_split(
    file: str, list_id: str, *, locate: Callable[[Location], Callable[[str], Path]] | None = None
) -> Callable[[Location], Listing]:
    """A split of CoOp: ``{"train" | "val" | "test": [[path, label, class name], ...]}``.

    Every label is checked against our class list. ``locate`` finds a path of the split in copies
    that are not laid out like the original.
    """

    def read(location: Location) -> Listing:
        path = location.need(file)
        rows = _read_split(path, location.split)
        names = class_names(list_id)
        for _, label, name in rows:
            if not 0 <= label < len(names) or squeeze(names[label]) != squeeze(name):
                known = names[label] if 0 <= label < len(names) else "no class"
                raise UserError(
                    f"{path} calls class {label} {name!r}, our list calls it {known!r}; "
                    "is it the split file of another dataset?"
                )
        at = locate(location) if locate else location.images.joinpath
        return listed([(key, label) for key, label, _ in rows], at)

    return read


def _read_split(path: Path, split: str) -> list[tuple[str, int, str]]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))[split]
        return [(str(file), int(label), str(name)) for file, label, name in listed]
    except KeyError:
        raise UserError(f"{path} has no split {split!r}") from None
    except (ValueError, TypeError):
        raise UserError(
            f"{path} is not a split file of CoOp (JSON of [path, label, class name]); "
            "was it downloaded whole?"
        ) from None


def listed(rows: Iterable[tuple[str, int]], locate: Callable[[str], Path]) -> Listing:
    """Pictures that a list names: those on disk, each once; the rest is counted."""
    rows = list(rows)
    unique = dict(rows)
    paths = {key: locate(key) for key in unique}
    there = _on_disk(paths.values())
    kept = [key for key, path in paths.items() if path in there]
    repeated = len(rows) - len(unique)
    notes = (f"{repeated} files are listed twice and counted once",) if repeated else ()
    return Listing(
        keys=kept,
        labels=[unique[key] for key in kept],
        paths=[paths[key] for key in kept],
        missing=len(unique) - len(kept),
        notes=notes,
    )


def _on_disk(paths: Iterable[Path]) -> set[Path]:
    """Find which of ``paths`` exist, with one look at each folder instead of one per file."""
    paths = list(paths)
    content: dict[Path, set[str]] = {}
    for folder in {path.parent for path in paths}:
        content[folder] = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    return {path for path in paths if path.name in content[path.parent]}


# --- official lists -----------------------------------------------------------------------------

PETS_LIST = "annotations/test.txt"
AIRCRAFT_LIST = "images_variant_{split}.txt"
SUN_LIST = "Testing_01.txt"
UCF_LISTS = ("testlist01.txt", "ucfTrainTestlist/testlist01.txt")


def read_pets(location: Location) -> Listing:
    """The official test list; the class is in the file name, after the number's underscore."""
    path = location.need(PETS_LIST)
    label_of = by_name("pets")
    names = [line.split()[0] for line in text_lines(path)]
    rows = [(f"{name}.jpg", _known(label_of(name.rpartition("_")[0]), name)) for name in names]
    return listed(rows, location.images.joinpath)


def read_aircraft(location: Location) -> Listing:
    """``images_variant_SPLIT.txt``: a number and a variant on each line."""
    path = location.need(AIRCRAFT_LIST.format(split=location.split))
    label_of = by_name("aircraft")
    pairs = [line.split(" ", 1) for line in text_lines(path)]
    rows = [(f"{number}.jpg", _known(label_of(name), name)) for number, name in pairs]
    return listed(rows, location.images.joinpath)


def read_sun(location: Location) -> Listing:
    """``Testing_01.txt``: lines ``/a/abbey/sun_x.jpg``; a qualifier comes first in the name."""
    path = location.need(SUN_LIST)
    label_of = by_name("sun397")
    rows = []
    for line in text_lines(path):
        key = line.removeprefix("/")
        name = " ".join(reversed(key.split("/")[1:-1]))
        rows.append((key, _known(label_of(name), key)))
    return listed(rows, location.images.joinpath)


def read_ucf(location: Location) -> Listing:
    """``testlist01.txt``: lines ``YoYo/v_YoYo_g01_c01.avi``, of which the middle frame is kept."""
    path = location.need(*UCF_LISTS)
    label_of = by_name("ucf101")
    folders = {squeeze(folder.name): folder.name for folder in location.images.iterdir()}
    rows = []
    for line in text_lines(path):
        action, _, video = line.split()[0].partition("/")
        folder = folders.get(squeeze(action), "_".join(re.findall("[A-Z][^A-Z]*", action)))
        rows.append((f"{folder}/{Path(video).stem}.jpg", _known(label_of(action), line)))
    return listed(rows, location.images.joinpath)


def _known(label: int | None, stated: str) -> int:
    if label is None:
        raise UserError(f"{stated!r} is not one of the classes")
    return label


# --- CIFAR --------------------------------------------------------------------------------------

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_BATCHES = {"test": ("test_batch",), "train": tuple(f"data_batch_{i}" for i in range(1, 6))}


def read_cifar10_pickles(location: Location) -> Listing:
    """``cifar-10-batches-py``: dicts of rows, labels and file names."""
    batches = [_unpickle(location.images / name) for name in _BATCHES[location.split]]
    return _from_batches(batches, "labels", class_names("cifar10"))


def read_cifar100_pickles(location: Location) -> Listing:
    """``cifar-100-python``: one dict per split, with fine and coarse labels."""
    return _from_batches(
        [_unpickle(location.images / location.split)], "fine_labels", _names("cifar100")
    )


def read_cifar10_records(location: Location) -> Listing:
    """``cifar-10-batches-bin``: records of one byte of label and 3,072 of pixels."""
    files = [location.images / f"{name}.bin" for name in _BATCHES[location.split]]
    return _from_records(files, 1, location.split, "cifar10")


def read_cifar100_records(location: Location) -> Listing:
    """``cifar-100-binary``: records of coarse label, fine label and pixels."""
    return _from_records([location.images / f"{location.split}.bin"], 2, location.split, "cifar100")


def read_cifar101(location: Location) -> Listing:
    """CIFAR-10.1: ``cifar10.1_v6_data.npy`` (N, 32, 32, 3) and its labels."""
    stem = location.images / f"cifar10.1_{location.split}"
    images = load_array(stem.with_name(f"{stem.name}_data.npy"))
    labels = load_array(stem.with_name(f"{stem.name}_labels.npy"))
    if images.shape[1:] != (_SIDE, _SIDE, 3) or labels.shape != images.shape[:1]:
        raise UserError(f"{stem}_*.npy have shapes {images.shape} and {labels.shape}")
    keys = [f"{location.split}/{i:04d}" for i in range(len(images))]
    return Listing(keys, labels.astype(int).tolist(), images=images.astype(np.uint8))


def _names(list_id: str) -> tuple[str, ...]:
    """Class names as folder names of the PNG copies spell them, for keys."""
    return tuple(name.replace(" ", "_") for name in class_names(list_id))


def _from_batches(batches: list[dict[str, Any]], field: str, names: tuple[str, ...]) -> Listing:
    labels = [int(label) for batch in batches for label in batch[field]]
    files = [str(name) for batch in batches for name in batch["filenames"]]
    rows = np.concatenate([np.asarray(batch["data"], np.uint8) for batch in batches])
    keys = [f"{names[label]}/{file}" for label, file in zip(labels, files, strict=True)]
    return Listing(keys, labels, images=_pictures(rows))


def _from_records(files: list[Path], lead: int, split: str, list_id: str) -> Listing:
    raw = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8) for path in files])
    if len(raw) % (lead + _PIXELS):
        raise UserError(f"{files[0]} is cut off: it holds no whole number of records")
    records = raw.reshape(-1, lead + _PIXELS)
    labels = records[:, lead - 1].astype(int).tolist()
    if max(labels, default=0) >= len(class_names(list_id)):
        raise UserError(f"{files[0]} holds no labels of {list_id}")
    keys = [f"{split}/{i:05d}" for i in range(len(records))]
    return Listing(keys, labels, images=_pictures(records[:, lead:]))


def _pictures(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(N, 32, 32, 3) of rows of 1,024 red, then green, then blue values."""
    return np.ascontiguousarray(rows.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1))


def load_array(path: Path) -> npt.NDArray[Any]:
    """An array file; nothing in it is executed."""
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except ValueError as error:
        raise UserError(f"{path} is not a whole array file ({error})") from None


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
