"""Check a data directory: what is there, in which layout, and what is wrong with it."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
    unreadable: Mapping[str, str] = field(default_factory=dict)  # key and reason
    duplicates: int = 0  # files whose content another file has as well
    contradictions: tuple[
        tuple[str, str], ...
    ] = ()  # pairs of equal files in different classes


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
    notes: tuple[str, ...] = ()  # pitfalls of this dataset that are handled here
    opened: Opened | None = None
    get: str = ""


@dataclass(frozen=True)
class Report:
    """The findings on all datasets, and folders that belong to none."""

    root: str
    findings: tuple[Finding, ...]
    unknown_folders: tuple[str, ...] = ()


OnImage = Callable[
    [str, int, int], None
]  # a dataset's id, how many images are opened, of how many


def examine(
    root: Path,
    *,
    ids: Sequence[str] | None = None,
    deep: bool = False,
    workers: int = 4,
    on_image: OnImage | None = None,
) -> Report:
    """Look for every known dataset, or ``ids``, under ``root``; ``deep`` opens all images."""
    if not root.is_dir():
        raise UserError(f"no folder {root}")
    known = {benchmark.id: benchmark for benchmark in BENCHMARKS}
    wanted = [look_up("dataset", id, known) for id in ids or known]
    findings = [_examine_one(one, root, deep, workers, on_image) for one in wanted]
    return Report(str(root), tuple(findings), _unknown_folders(root) if not ids else ())


def _examine_one(
    benchmark: Benchmark, root: Path, deep: bool, workers: int, on_image: OnImage | None
) -> Finding:
    id, get = benchmark.id, benchmark.get
    try:
        layout, location = benchmark.find(root)
    except DataNotFoundError as error:
        problems = (*error.near_misses, *_packed(benchmark, root))
        return Finding(
            id, "broken" if problems else "missing", problems=problems, get=get
        )
    where = layout.name, str(location.images)
    try:
        listing = benchmark.read(root)
    except (ValueError, OSError) as error:
        return Finding(id, "broken", *where, problems=(str(error),), get=get)
    splits = {}
    for split, expected in benchmark.splits.items():
        # splits beside the default one may be missing
        with suppress(ValueError, OSError):
            one = (
                listing
                if split == benchmark.default_split
                else benchmark.read(root, split)
            )
            splits[split] = SplitCount(len(one.keys), expected, one.missing)
    opened = _open_all(id, listing, workers, on_image) if deep else None
    seen = set(listing.labels)
    empty = tuple(
        name for label, name in enumerate(benchmark.names) if label not in seen
    )
    problems = _problems(
        splits[benchmark.default_split], empty, len(benchmark.names), opened
    )
    state: State = "incomplete" if problems else "complete"
    notes = (*listing.notes, *benchmark.traps)
    get = get if problems else ""
    return Finding(id, state, *where, splits, empty, problems, notes, opened, get)


def _packed(benchmark: Benchmark, root: Path) -> Iterator[str]:
    """Problems with archives of a dataset that were not extracted."""
    names = {squeeze(name.split("/")[0]) for name in benchmark.folders}
    for path in sorted(root.iterdir()):
        ending = next((e for e in _ARCHIVES if path.name.lower().endswith(e)), None)
        if ending and squeeze(path.name[: -len(ending)]) in names:
            yield f"{path} is not extracted"


def _problems(
    count: SplitCount, empty: Sequence[str], classes: int, opened: Opened | None
) -> tuple[str, ...]:
    problems = []
    if count.found != count.expected:
        absent = f"; {count.absent:,} listed files are missing" if count.absent else ""
        problems.append(
            f"{count.found:,} images, a complete copy has {count.expected:,}{absent}"
        )
    if empty:
        shown = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
        problems.append(
            f"{len(empty):,} of {classes:,} classes have no images: {shown}"
        )
    if opened is not None and opened.unreadable:
        key, reason = next(iter(opened.unreadable.items()))
        unread = len(opened.unreadable)
        problems.append(f"{unread:,} images cannot be read, such as {key}: {reason}")
    return tuple(problems)


def _open_all(
    id: str, listing: Listing, workers: int, on_image: OnImage | None
) -> Opened | None:
    """Open every file; ``None`` for data that come as arrays, which are read already."""
    from cliquetta.data.workers import map_ahead

    if listing.images is not None:
        return None
    unreadable: dict[str, str] = {}
    same: dict[str, list[int]] = defaultdict(list)
    results = map_ahead(_try, listing.paths, workers=workers, ahead=_AHEAD)
    for row, (digest, reason) in enumerate(results):
        if reason:
            unreadable[listing.keys[row]] = reason
        else:
            same[digest].append(row)
        if on_image is not None:
            on_image(id, row + 1, len(listing.paths))
    contradictions = [
        (listing.keys[first], listing.keys[other])
        for first, *others in same.values()
        for other in others
        if listing.labels[first] != listing.labels[other]
    ]
    duplicates = sum(len(rows) - 1 for rows in same.values())
    return Opened(len(listing.paths), unreadable, duplicates, tuple(contradictions))


def _try(path: Path) -> tuple[str, str]:
    """Hash of a file, and why it is no picture (empty if it is one)."""
    try:
        data = read_image(path)
        open_image(data, exif=False)
    except ImageError as error:
        return "", error.reason
    return hashlib.sha256(data).hexdigest(), ""


def _unknown_folders(root: Path) -> tuple[str, ...]:
    """Folders under the root that belong to no known dataset."""
    names = [
        name.split("/")[0]
        for benchmark in BENCHMARKS
        for split in benchmark.splits
        for one in benchmark.layouts
        for name in (*benchmark.folders, *alternatives(one.folders, split))
    ]
    if any(root == folder for folder in candidate_folders(root, names)):
        return ()  # the root is itself a dataset
    ours = {*map(squeeze, names), "splits", "split"}
    folders = (path.name for path in root.iterdir() if path.is_dir())
    unknown = (n for n in folders if not n.startswith(".") and squeeze(n) not in ours)
    return tuple(sorted(unknown))
