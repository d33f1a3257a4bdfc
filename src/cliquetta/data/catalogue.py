"""The list of data sets: adding one is one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cliquetta.data.benchmarks import BENCHMARKS, Benchmark
from cliquetta.data.bundled import BundledSplit, load_bundled
from cliquetta.data.dataset import ArrayDataset, Dataset
from cliquetta.data.folder import folder_dataset
from cliquetta.data.huggingface import hugging_face_dataset
from cliquetta.data.shifts import ShiftedDataset, parse_dataset_id
from cliquetta.data.tables import table_dataset
from cliquetta.data.tar import tar_dataset
from cliquetta.errors import UnknownNameError, UserError

FOLDER = "folder:"
YOURS: dict[str, tuple[Callable[[str], Dataset], str]] = {
    FOLDER: (lambda at: folder_dataset(_path(at)), "a folder of images, a sub-folder a class"),
    "csv:": (lambda at: table_dataset(_path(at)), "a CSV or TSV file of paths and classes"),
    "tar:": (lambda at: tar_dataset(_path(at)), "tar shards (WebDataset), one or a folder of them"),
    "hf:": (hugging_face_dataset, "a data set of the Hugging Face hub, or one saved to disk"),
}
"""Anybody's own data: the prefix of an id, how to build it and what it is."""


@dataclass(frozen=True)
class DatasetEntry:
    """One known data set: what it is and how to build it from the folder where its files lie."""

    id: str
    summary: str
    build: Callable[[Path | None, str | None], Dataset]
    """Gets the root folder of all data sets, ``None`` if the user named none, and the part."""
    classes: int
    expected: Mapping[str, int] = field(default_factory=dict)
    """Counts that a complete copy has, such as ``{"images": 2000}``."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Parts that may be named behind a slash (``pacs/sketch``), with their number of images; the
    first is meant when none is named."""
    source: str = ""
    """Where the data come from and under what terms."""
    needs_root: bool = True
    """False for data that come with the package."""


def _bundled(split: BundledSplit, id: str) -> Callable[[Path | None, str | None], Dataset]:
    def build(root: Path | None, part: str | None) -> Dataset:
        del root  # comes with the package
        if part is not None:
            raise UserError(f"{id} has no parts, got {part!r}")
        data = load_bundled(split)
        return ArrayDataset(
            id, data.images, names=data.names, keys=data.keys, labels=data.labels.tolist()
        )

    return build


def _entry(benchmark: Benchmark) -> DatasetEntry:
    def build(root: Path | None, part: str | None) -> Dataset:
        if root is None:
            raise UserError(
                f"{benchmark.id} is not part of the package: say where it lies with --root. "
                f"{benchmark.get}"
            )
        return benchmark.build(root, part)

    return DatasetEntry(
        benchmark.id,
        benchmark.summary,
        build,
        classes=len(benchmark.names),
        expected={"images": benchmark.parts[benchmark.default_part]},
        parts=benchmark.parts,
        source=benchmark.terms,
    )


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
        *map(_entry, BENCHMARKS),
    )
}


def list_datasets() -> list[DatasetEntry]:
    """All entries, by id."""
    return [_ENTRIES[id] for id in sorted(_ENTRIES)]


def get_dataset(id: str, root: Path | str | None = None, *, noise_seed: int = 0) -> Dataset:
    """The data set of an id, with its part and its shift if they are written behind it.

    ``pacs/sketch@fog:3`` is the sketches of PACS in fog. ``folder:PATH``, ``csv:PATH``,
    ``tar:PATH`` and ``hf:NAME`` take anybody's own data. ``noise_seed`` draws the noise of a shift.
    """
    base, shift = parse_dataset_id(id)
    dataset = _plain_dataset(base, None if root is None else _path(root))
    return dataset if shift is None else ShiftedDataset(dataset, shift, seed=noise_seed)


def _plain_dataset(id: str, root: Path | None) -> Dataset:
    prefix, colon, rest = id.partition(":")
    if colon and f"{prefix}:" in YOURS:
        return YOURS[f"{prefix}:"][0](rest)
    name, slash, part = id.partition("/")
    if name not in _ENTRIES:
        raise UnknownNameError("data set", id, [*_ENTRIES, f"{FOLDER}PATH"])
    return _ENTRIES[name].build(root, part if slash else None)


def _path(given: Path | str) -> Path:
    return Path(given).expanduser()
