"""Check a data directory: what is there, in which layout, and what is wrong with it."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from cliquetta.data.benchmarks import BENCHMARKS, Benchmark, DataNotFoundError
from cliquetta.data.benchmarks.benchmark import (
    Listing,
    alternatives,
    candidate_folders,
    squeeze,
)
from cliquetta.data.images import ImageError, open_image, read_image
from cliquetta.errors import UserError, look_up

State = Literal["complete", "incomplete", "broken", "missing"]
_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".zip")
_AHEAD = 64


@dataclass(frozen=True)
class SplitCount:
    """Images of one split."""

    found: int
    expected: int
    absent: int = 0


@dataclass(frozen=True)
class Opened:
    """Findings from opening every image of the default split."""

    images: int
    # Key and reason.
    unreadable: Mapping[str, str] = field(default_factory=dict)
    # Files whose content another file has as well.
    duplicates: int = 0
    # Pairs of equal files in different classes.
    contradictions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Finding:
    """State of one dataset under the root."""

    id: str
    state: State
    layout: str = ""
    folder: str = ""
    splits: Mapping[str, SplitCount] = field(default_factory=dict)
    empty_classes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    # Pitfalls of this dataset that are handled here.
    notes: tuple[str, ...] = ()
    opened: Opened | None = None
    get: str = ""


@dataclass(frozen=True)
class Report:
    """Findings on all datasets, and folders that belong to none."""

    root: str
    findings: tuple[Finding, ...]
    unknown_folders: tuple[str, ...] = ()


# A dataset's id, how many images are opened, of how many.
OnImage = Callable[[str, int, int], None]


def examine(
    root: Path,
    *,
    ids: Sequence[str] | None = None,
    deep: bool = False,
    workers: int = 4,
    on_image: OnImage | None = None,
) -> Report:
    """Look for every benchmark, or ``ids``, under ``root``; ``deep`` opens all images."""
    if not root.is_dir():
        raise UserError(f"no folder {root}")
    by_id = {benchmark.id: benchmark for benchmark in BENCHMARKS}

    findings = []
    for benchmark in [look_up("dataset", id, by_id) for id in ids or by_id]:
        findings.append(_examine_one(benchmark, root, deep, workers, on_image))

    unknown = () if ids else _unknown_folders(root)
    return Report(str(root), tuple(findings), unknown)


def _examine_one(
    benchmark: Benchmark, root: Path, deep: bool, workers: int, on_image: OnImage | None
) -> Finding:
    """Look for one dataset."""
    id = benchmark.id
    try:
        layout, location = benchmark.find(root)
    except DataNotFoundError as error:
        problems = (*error.near_misses, *_archives(benchmark, root))
        state: State = "broken" if problems else "missing"
        return Finding(id, state, problems=problems, get=benchmark.get)
    finding = Finding(
        id, "complete", layout=layout.name, folder=str(location.images), get=""
    )
    try:
        listing = benchmark.read(root)
    except (ValueError, OSError) as error:
        return replace(
            finding, state="broken", problems=(str(error),), get=benchmark.get
        )

    opened = _open_all(id, listing, workers, on_image) if deep else None
    labels = set(listing.labels)
    names = benchmark.names
    empty = tuple(name for label, name in enumerate(names) if label not in labels)
    splits = _count_splits(benchmark, root, listing)

    problems = _problems(splits[benchmark.default_split], empty, len(names), opened)
    return replace(
        finding,
        state="incomplete" if problems else "complete",
        splits=splits,
        empty_classes=empty,
        problems=problems,
        notes=(*listing.notes, *benchmark.traps),
        opened=opened,
        get=benchmark.get if problems else "",
    )


def _count_splits(
    benchmark: Benchmark, root: Path, default: Listing
) -> dict[str, SplitCount]:
    """Count the images of all splits; those beside the default one may be missing."""
    splits = {}
    for split, expected in benchmark.splits.items():
        listing = default
        if split != benchmark.default_split:
            try:
                listing = benchmark.read(root, split)
            except (ValueError, OSError):
                continue
        splits[split] = SplitCount(len(listing.keys), expected, listing.missing)
    return splits


def _archives(benchmark: Benchmark, root: Path) -> Iterator[str]:
    """Report archives of a dataset that were not extracted."""
    names = {squeeze(name.split("/")[0]) for name in benchmark.folders}
    for path in sorted(root.iterdir()):
        file_name = path.name.lower()
        ending = next((end for end in _ARCHIVES if file_name.endswith(end)), None)
        if ending is None:
            continue

        if squeeze(path.name[: -len(ending)]) in names:
            yield f"{path} is not extracted"


def _problems(
    count: SplitCount, empty: Sequence[str], classes: int, opened: Opened | None
) -> tuple[str, ...]:
    """Describe what a dataset lacks, one sentence each."""
    problems = []
    if count.found != count.expected:
        absent = f"; {count.absent:,} listed files are missing" if count.absent else ""
        problems.append(
            f"{count.found:,} images, a complete copy has {count.expected:,}{absent}"
        )

    if empty:
        names = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
        problems.append(
            f"{len(empty):,} of {classes:,} classes have no images: {names}"
        )

    if opened is not None and opened.unreadable:
        key, reason = next(iter(opened.unreadable.items()))
        unreadable = len(opened.unreadable)
        problems.append(
            f"{unreadable:,} images cannot be read, such as {key}: {reason}"
        )
    return tuple(problems)


def _open_all(
    id: str, listing: Listing, workers: int, on_image: OnImage | None
) -> Opened | None:
    """Open every file; ``None`` for data that come as arrays, which are read already."""
    from cliquetta.data.workers import map_ahead

    if listing.images is not None:
        return None
    digests = []
    unreadable: dict[str, str] = {}
    results = map_ahead(_try, listing.paths, workers=workers, ahead=_AHEAD)
    for row, (digest, reason) in enumerate(results):
        digests.append(digest)
        if reason:
            unreadable[listing.keys[row]] = reason
        if on_image is not None:
            on_image(id, row + 1, len(listing.paths))

    # Of equal files in different classes, one has a wrong label.
    duplicates = 0
    contradictions = []
    for first, other in equal_pairs(digests):
        duplicates += 1
        if listing.labels[first] != listing.labels[other]:
            contradictions.append((listing.keys[first], listing.keys[other]))
    return Opened(len(listing.paths), unreadable, duplicates, tuple(contradictions))


def equal_pairs(digests: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the first of each set of equal files with every other one, by their hashes.

    Files without a hash, which cannot be read, are equal to none.
    """
    rows_by_digest: dict[str, list[int]] = defaultdict(list)
    for row, digest in enumerate(digests):
        if digest:
            rows_by_digest[digest].append(row)

    for first, *others in rows_by_digest.values():
        for other in others:
            yield first, other


def _try(path: Path) -> tuple[str, str]:
    """Hash a file, or say why it is no picture; the other of both texts is empty."""
    try:
        data = read_image(path)
        open_image(data, exif=False)
    except ImageError as error:
        return "", error.reason
    return hashlib.sha256(data).hexdigest(), ""


def _unknown_folders(root: Path) -> tuple[str, ...]:
    """List the folders under the root that belong to no benchmark."""
    names: set[str] = set()
    for benchmark in BENCHMARKS:
        paths = list(benchmark.folders)
        for split in benchmark.splits:
            for layout in benchmark.layouts:
                paths += alternatives(layout.folders, split)
        names.update(path.split("/")[0] for path in paths)
    if root in candidate_folders(root, sorted(names)):
        return ()  # the root is itself a dataset

    ours = {*map(squeeze, names), "splits", "split"}
    unknown = []
    for path in root.iterdir():
        hidden = path.name.startswith(".")
        if path.is_dir() and not hidden and squeeze(path.name) not in ours:
            unknown.append(path.name)
    return tuple(sorted(unknown))
