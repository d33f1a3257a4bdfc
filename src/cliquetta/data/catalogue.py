"""List of datasets: adding one is one entry."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cliquetta.data.benchmarks import BENCHMARKS, Benchmark
from cliquetta.data.bundled import BundledSplit, load_bundled
from cliquetta.data.corruptions import ShiftedDataset, parse_dataset_id
from cliquetta.data.dataset import Dataset
from cliquetta.data.features import feature_dataset
from cliquetta.data.files import NoClassNamesError, folder_dataset, table_dataset
from cliquetta.data.huggingface import hugging_face_dataset
from cliquetta.data.remote import require_exists
from cliquetta.data.tar import tar_dataset
from cliquetta.errors import UnknownNameError, UserError

FOLDER = "folder:"
Names = Sequence[str] | None
Build = Callable[[str, Names], Dataset]


def _of_path(build: Callable[[Path, Names], Dataset]) -> Build:
    """Build a dataset of the path behind a prefix."""
    return lambda rest, names: build(Path(rest).expanduser(), names)


# By the prefix of an id: how to build it, what it is.
YOURS: dict[str, tuple[Build, str]] = {
    FOLDER: (_of_path(folder_dataset), "a folder of images, one sub-folder per class"),
    "csv:": (_of_path(table_dataset), "a CSV or TSV file of paths and classes"),
    "tar:": (_of_path(tar_dataset), "tar shards (WebDataset), one or a folder of them"),
    "hf:": (
        lambda rest, names: hugging_face_dataset(rest),
        "a dataset of the Hugging Face hub, or one saved to disk",
    ),
    "features:": (
        _of_path(feature_dataset),
        "features of images (.npy, .npz, .safetensors), for methods that need no more",
    ),
}


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset: what it is and how to build it from its files."""

    id: str
    summary: str
    # Build it from root, split and class names.
    build: Callable[[Path | None, str | None, Names], Dataset]
    classes: int
    # Counts that a complete copy has, such as `{"images": 2000}`.
    expected: Mapping[str, int]
    # Where the data come from and under what terms.
    source: str
    # Images of each, the default first.
    splits: Mapping[str, int] = field(default_factory=dict)
    # False for data that come with the package.
    needs_root: bool = True


def _bundled(id: str, which: BundledSplit, images: int, summary: str) -> DatasetEntry:
    """Describe a split of the bundled pictures."""

    def build(root: Path | None, split: str | None, classes: Names) -> Dataset:
        _refuse_split(id, split)
        return load_bundled(which)

    return DatasetEntry(
        id,
        f"{images:,} {summary}; comes with the package",
        build,
        classes=10,
        expected={"images": images},
        source="CIFAR-10 (Krizhevsky, 2009); see cliquetta/data/bundled/README.md",
        needs_root=False,
    )


def _refuse_split(id: str, split: str | None) -> None:
    """Refuse a split of a dataset that has none."""
    if split is not None:
        raise UserError(f"{id} has no splits, got {split!r}")


def _entry(benchmark: Benchmark) -> DatasetEntry:
    """Describe a benchmark."""
    return DatasetEntry(
        benchmark.id,
        benchmark.summary,
        benchmark.build,
        classes=len(benchmark.names),
        expected={"images": benchmark.splits[benchmark.default_split]},
        source=benchmark.terms,
        splits=benchmark.splits,
    )


_ENTRIES = (
    _bundled("bundled", "test", 2000, "test images of CIFAR-10, 200 per class"),
    _bundled(
        "bundled-fewshot", "few-shot", 160, "training images of CIFAR-10, 16 per class"
    ),
    *map(_entry, BENCHMARKS),
)


def list_datasets() -> list[DatasetEntry]:
    """List all entries, by id."""
    return sorted(_ENTRIES, key=lambda entry: entry.id)


def get_dataset(
    id: str,
    root: Path | str | None = None,
    *,
    noise_seed: int = 0,
    classes: Names = None,
) -> Dataset:
    """Build the dataset of an id, which may name a split and a shift.

    >>> len(get_dataset("bundled@fog:3"))
    2000

    Args:
        id: Such as ``pacs/sketch@fog:3``, the sketches of PACS in fog. ``folder:PATH``,
            ``csv:PATH``, ``tar:PATH`` and ``hf:NAME`` read your own data,
            ``features:PATH`` what an encoder made of it.
        root: Folder of your copies of known datasets; nothing is downloaded.
        noise_seed: Seed of the noise of a shift.
        classes: Class names for data of your own that have none.

    Returns:
        The dataset; a :class:`~cliquetta.data.stream.Stream` puts it into batches.

    Raises:
        UserError: No such dataset, split or shift, or its files are not where they
            should be.

    """
    base, shift = parse_dataset_id(id)
    folder = None if root is None else Path(root).expanduser()

    # Class names serve only where the data have none.
    try:
        dataset = _plain_dataset(base, folder, None)
    except NoClassNamesError:
        if classes is None:
            raise
        dataset = _plain_dataset(base, folder, classes)
    return dataset if shift is None else ShiftedDataset(dataset, shift, seed=noise_seed)


def check_dataset(id: str, root: Path | str | None = None) -> None:
    """Check that a dataset exists and that its files are there, without reading them.

    Args:
        id: As for :func:`get_dataset`.
        root: Folder of your copies of known datasets.

    Raises:
        UserError: No such dataset, split or shift, or nothing where its files should
            be.

    """
    base, _ = parse_dataset_id(id)
    prefix, colon, rest = base.partition(":")
    if colon and f"{prefix}:" in YOURS:
        is_local = prefix != "hf" and "{" not in rest  # shard-{000..012}.tar
        if is_local:
            require_exists(Path(rest).expanduser())
        return

    name, split = _split_id(base)
    for benchmark in BENCHMARKS:
        if benchmark.id == name:
            folder = None if root is None else Path(root).expanduser()
            benchmark.require(folder, split)
            return
    _find_entry(name, id)
    _refuse_split(name, split)


def _split_id(id: str) -> tuple[str, str | None]:
    """Split an id without a shift into the name of a dataset and a split, if it names one."""
    name, slash, split = id.partition("/")
    return name, split if slash else None


def _find_entry(name: str, id: str) -> DatasetEntry:
    """Find the entry of a name, which is that of the dataset in ``id``."""
    for entry in _ENTRIES:
        if entry.id == name:
            return entry
    names = [entry.id for entry in _ENTRIES]
    raise UnknownNameError("dataset", id, [*names, f"{FOLDER}PATH"])


def _plain_dataset(id: str, root: Path | None, classes: Names) -> Dataset:
    """Build the dataset of an id without a shift."""
    prefix, colon, rest = id.partition(":")
    if colon and f"{prefix}:" in YOURS:
        build, _ = YOURS[f"{prefix}:"]
        return build(rest, classes)

    # A dataset of the table, with the split that the id names.
    name, split = _split_id(id)
    return _find_entry(name, id).build(root, split, classes)
