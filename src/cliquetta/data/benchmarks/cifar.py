"""Readers of CIFAR's own formats: pickles, binary records and the arrays of CIFAR-10.1."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from cliquetta.data.benchmarks.place import Listing, Place
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import class_names

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_BATCHES = {
    "test": ("test_batch",),
    "train": tuple(f"data_batch_{i}" for i in range(1, 6)),
}


def read_cifar10_pickles(place: Place) -> Listing:
    """``cifar-10-batches-py``: dicts of rows, labels and file names."""
    batches = [_unpickle(place.images / name) for name in _BATCHES[place.split]]
    return _from_batches(batches, "labels", class_names("cifar10"))


def read_cifar100_pickles(place: Place) -> Listing:
    """``cifar-100-python``: one dict per split, with fine and coarse labels."""
    return _from_batches([_unpickle(place.images / place.split)], "fine_labels", _names("cifar100"))


def read_cifar10_records(place: Place) -> Listing:
    """``cifar-10-batches-bin``: records of one byte of label and 3,072 of pixels."""
    files = [place.images / f"{name}.bin" for name in _BATCHES[place.split]]
    return _from_records(files, 1, place.split, "cifar10")


def read_cifar100_records(place: Place) -> Listing:
    """``cifar-100-binary``: records of coarse label, fine label and pixels."""
    return _from_records([place.images / f"{place.split}.bin"], 2, place.split, "cifar100")


def read_cifar101(place: Place) -> Listing:
    """CIFAR-10.1: ``cifar10.1_v6_data.npy`` (N, 32, 32, 3) and its labels."""
    stem = place.images / f"cifar10.1_{place.split}"
    images = load_array(stem.with_name(f"{stem.name}_data.npy"))
    labels = load_array(stem.with_name(f"{stem.name}_labels.npy"))
    if images.shape[1:] != (_SIDE, _SIDE, 3) or labels.shape != images.shape[:1]:
        raise UserError(f"{stem}_*.npy have shapes {images.shape} and {labels.shape}")
    keys = [f"{place.split}/{i:04d}" for i in range(len(images))]
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
            return _ALLOWED[module, name]()
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _reconstruct() -> Any:
    return np.zeros(0).__reduce__()[0]  # wherever this version of numpy keeps it


_ALLOWED: dict[tuple[str, str], Callable[[], Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): lambda: np.ndarray,
    ("numpy", "dtype"): lambda: np.dtype,
    ("_codecs", "encode"): lambda: _encode,
}


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into old pickles."""
    return text.encode(encoding)


def _unpickle(path: Path) -> dict[str, Any]:
    file: IO[bytes]
    with path.open("rb") as file:
        try:
            return dict(_ArraysOnly(file, encoding="latin1").load())
        except Exception as error:  # a damaged pickle raises errors of every kind
            raise UserError(f"{path} is not a batch of CIFAR ({error})") from None
