"""The list of data sets: adding one is one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cliquetta.data.bundled import BundledSplit, load_bundled
from cliquetta.data.dataset import ArrayDataset, Dataset
from cliquetta.data.folder import folder_dataset
from cliquetta.data.shifts import ShiftedDataset, parse_dataset_id
from cliquetta.errors import UnknownNameError

FOLDER = "folder:"


@dataclass(frozen=True)
class DatasetEntry:
    """One known data set: what it is and how to build it from the folder where its files lie."""

    id: str
    summary: str
    build: Callable[[Path | None], Dataset]
    """Gets the root folder of all data sets, ``None`` if the user named none."""
    classes: int
    expected: Mapping[str, int] = field(default_factory=dict)
    """Counts that a complete copy has, such as ``{"images": 2000}``."""
    source: str = ""
    """Where the data come from and under what terms."""
    needs_root: bool = True
    """False for data that come with the package."""


def _bundled(split: BundledSplit, id: str) -> Callable[[Path | None], Dataset]:
    def build(root: Path | None) -> Dataset:
        del root  # comes with the package
        data = load_bundled(split)
        return ArrayDataset(
            id, data.images, names=data.names, keys=data.keys, labels=data.labels.tolist()
        )

    return build


_CIFAR = "CIFAR-10 (Krizhevsky, 2009); see cliquetta/data/bundled/README.md"

_ENTRIES: dict[str, DatasetEntry] = {
    entry.id: entry
    for entry in (
        DatasetEntry(
            "bundled",
            "2,000 test images of CIFAR-10, 200 a class; comes with the package",
            _bundled("test", "bundled"),
            classes=10,
            expected={"images": 2000},
            source=_CIFAR,
            needs_root=False,
        ),
        DatasetEntry(
            "bundled-fewshot",
            "160 training images of CIFAR-10, 16 a class, for few-shot methods",
            _bundled("few-shot", "bundled-fewshot"),
            classes=10,
            expected={"images": 160},
            source=_CIFAR,
            needs_root=False,
        ),
    )
}


def list_datasets() -> list[DatasetEntry]:
    """All entries, by id."""
    return [_ENTRIES[id] for id in sorted(_ENTRIES)]


def get_dataset(id: str, root: Path | str | None = None) -> Dataset:
    """The data set of an id, with its shift if one is written behind it.

    ``folder:PATH`` takes any folder of images, with one sub-folder per class or none.
    """
    base, shift = parse_dataset_id(id)
    dataset: Dataset
    if base.startswith(FOLDER):
        dataset = folder_dataset(Path(base.removeprefix(FOLDER)).expanduser())
    elif base in _ENTRIES:
        dataset = _build(_ENTRIES[base], root)
    else:
        raise UnknownNameError("data set", base, [*_ENTRIES, f"{FOLDER}PATH"])
    return dataset if shift is None else ShiftedDataset(dataset, shift)


def _build(entry: DatasetEntry, root: Path | str | None) -> Dataset:
    if entry.needs_root and root is None:
        raise ValueError(f"{entry.id} is not part of the package: say where it lies with --root")
    dataset = entry.build(None if root is None else Path(root).expanduser())
    if len(dataset.names) != entry.classes:
        raise ValueError(
            f"{entry.id} has {entry.classes} classes, {len(dataset.names)} were found; "
            "is the copy complete?"
        )
    return dataset
