"""Locations of a dataset's files under the user's root, and what was found there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cliquetta.data.dataset import UInt8Array
from cliquetta.errors import UserError

SPLIT_FOLDERS = (".", "splits", "split")
"""Where side files are looked for, below the folders that may hold them."""
COOP = "split_zhou_"
"""How the names of CoOp's split files begin."""


@dataclass(frozen=True)
class Location:
    """A location at which a layout was found."""

    root: Path
    folder: Path
    """The dataset's own folder."""
    images: Path
    """The folder inside it that holds the pictures."""
    split: str
    """Which split is asked for, such as ``test`` or ``sketch``."""

    def need(self, *names: str) -> Path:
        """The first of some side files that is there; an error if none is."""
        found = next((path for name in names if (path := self.file(name))), None)
        if found is None:
            raise UserError(f"no {' or '.join(names)} beside {self.images}")
        return found

    def file(self, name: str) -> Path | None:
        """A side file: beside the pictures, above them, or (splits of CoOp) at the root."""
        homes = [self.images, *self.images.parents]
        homes = homes[: homes.index(self.root)] if self.root in homes else homes[:1]
        # At the root, names like val.txt could be any dataset's.
        if self.folder == self.root or name.startswith(COOP):
            homes.append(self.root)
        paths = (home / sub / name for home in homes for sub in SPLIT_FOLDERS)
        return next((path for path in paths if path.is_file()), None)


@dataclass(frozen=True, eq=False)
class Listing:
    """The images of one split of a dataset, in order."""

    keys: Sequence[str]
    """Names that do not depend on the location."""
    labels: Sequence[int]
    paths: Sequence[Path] = ()
    images: UInt8Array | None = None
    """(N, H, W, 3) for data that come as arrays; ``paths`` is empty then."""
    missing: int = 0
    """Files that a list names and that are missing."""
    notes: tuple[str, ...] = ()
    """Peculiarities and how they were handled."""


@dataclass(frozen=True)
class Layout:
    """One way in which copies of a dataset are laid out."""

    name: str
    """For people: what a folder in this layout looks like."""
    read: Callable[[Location], Listing]
    inside: tuple[str, ...] = (".",)
    """Where the images may be in the dataset's folder; ``{split}`` stands for the split."""
    shows: tuple[str, ...] = ()
    """Patterns below the pictures' folder that must match something."""
    files: tuple[str, ...] = ()
    """Side files, of which one must be there (:meth:`Location.file`); ``{split}`` as above."""
    splits: tuple[str, ...] | None = None
    """The splits that this layout can tell apart; ``None`` for all."""
    folders: tuple[str, ...] = ()
    """Names of the dataset's folder in this layout, if not the dataset's own."""


def squeeze(name: str) -> str:
    """A name without case, blanks, dashes and underscores: ``Caltech-101`` is ``caltech101``."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def candidate_folders(root: Path, names: Sequence[str]) -> Iterator[Path]:
    """Folders under ``root`` that are called like one of ``names``, each once.

    A name may have several steps (``imagenet-adversarial/imagenet-a``). The root may also be the
    folder itself.
    """
    seen: set[Path] = set()
    for name in names:
        steps = [squeeze(step) for step in name.split("/")]
        starts = [(root, steps)]
        if squeeze(root.absolute().name) == steps[0]:
            starts.append((root, steps[1:]))
        for start, rest in starts:
            for folder in _descend(start, rest):
                if folder not in seen:
                    seen.add(folder)
                    yield folder


def _descend(folder: Path, steps: Sequence[str]) -> Iterator[Path]:
    if not steps:
        yield folder
        return
    children = (path for path in folder.iterdir() if squeeze(path.name) == steps[0])
    for child in sorted(path for path in children if path.is_dir()):
        yield from _descend(child, steps[1:])


def find_locations(
    root: Path, folders: Sequence[str], layouts: Sequence[Layout], split: str
) -> Iterator[tuple[Layout, Location]]:
    """Every location under ``root`` where one of ``layouts`` has ``split``, best layout first."""
    for layout in layouts:
        if layout.splits is None or split in layout.splits:
            for location in _locations(root, folders, layout, split):
                if _has_files(layout, location):
                    yield layout, location


def near_misses(
    root: Path, folders: Sequence[str], layouts: Sequence[Layout], split: str
) -> list[str]:
    """Messages on folders whose images are there and whose side file is not."""
    found: list[str] = []
    for layout in layouts:
        for location in _locations(root, folders, layout, split):
            if layout.splits is not None and split not in layout.splits:
                found.append(f"{location.images} is there, but its layout has no split {split!r}")
            elif not _has_files(layout, location):
                wanted = " or ".join(layout.files)
                found.append(
                    f"{location.images} is there, but not {wanted}: put it in {location.folder}"
                )
    return list(dict.fromkeys(found))


def _locations(
    root: Path, folders: Sequence[str], layout: Layout, split: str
) -> Iterator[Location]:
    names = [name.format(split=split) for name in layout.folders or folders]
    for folder in candidate_folders(root, names):
        shows = [pattern.format(split=split) for pattern in layout.shows]
        for inside in layout.inside:
            images = folder / inside.format(split=split)
            if images.is_dir() and all(any(images.glob(pattern)) for pattern in shows):
                yield Location(root, folder, images, split)


def _has_files(layout: Layout, location: Location) -> bool:
    return not layout.files or any(
        location.file(name.format(split=location.split)) for name in layout.files
    )
