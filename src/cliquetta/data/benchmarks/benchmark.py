"""Known datasets: what each is, in which layouts it comes, and where one lies under a root."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cliquetta.data.dataset import ArrayDataset, Dataset, FileDataset, UInt8Array
from cliquetta.data.files import NoClassNamesError
from cliquetta.errors import UnknownNameError, UserError, look_up
from cliquetta.prompts.catalogue import class_names, template_choice, templates

# How the names of CoOp's split files begin.
COOP = "split_zhou_"
# Folders of side files, below those that may hold them.
_SPLIT_FOLDERS = (".", "splits", "split")


class DataNotFoundError(UserError):
    """Dataset that is not under the root; says where it was looked for and how to get it."""

    def __init__(self, message: str, near_misses: Sequence[str] = ()) -> None:
        super().__init__(message)
        # Images that are there without their side file or split.
        self.near_misses = near_misses


@dataclass(frozen=True)
class Location:
    """Folder in which a layout has a split."""

    # The folder that holds the pictures.
    images: Path
    split: str
    # The first of the layout's side files.
    file: Path | None = None


@dataclass(frozen=True, eq=False)
class Listing:
    """Images of one split of a dataset, in order."""

    # Names that do not depend on the location.
    keys: Sequence[str]
    labels: Sequence[int]
    paths: Sequence[Path] = ()
    # (N, H, W, 3) for data that come as arrays, without paths.
    images: UInt8Array | None = None
    missing: int = 0
    # Peculiarities and how they were handled.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One way in which copies of a dataset are laid out; alternatives are separated by ``|``.

    ``{split}`` in a name stands for the split, ``{domain}`` for it without ``-test``.
    """

    # For people: what a folder in this layout looks like.
    name: str
    read: Callable[[Location], Listing]
    # Where the images may be in the dataset's folder.
    inside: str = "."
    # Patterns below the pictures' folder of which each must match something.
    shows: str = ""
    # Side files, one of which is beside the pictures, above them or at the root.
    files: str = ""
    # The splits that this layout distinguishes; all if empty.
    splits: str = ""
    # Names of the dataset's folder in this layout, if not the dataset's own.
    folders: str = ""

    def locations(
        self, root: Path, folders: Sequence[str], split: str
    ) -> Iterator[tuple[Location, str]]:
        """Find folders under ``root`` that look like this layout, and what each lacks."""
        files = alternatives(self.files, split)
        patterns = alternatives(self.shows, split)
        inside = alternatives(self.inside, split)
        names = alternatives(self.folders, split) or folders
        for folder in candidate_folders(root, names):
            for images in (folder / below for below in inside):
                if not images.is_dir():
                    continue
                if not all(any(images.glob(pattern)) for pattern in patterns):
                    continue

                beside = (_side_file(root, folder, images, name) for name in files)
                file = next((path for path in beside if path is not None), None)

                # A place that lacks something is reported, in case no other has it
                # all.
                lack = ""
                if self.splits and split not in alternatives(self.splits, split):
                    lack = f"{images} is there, but its layout has no split {split!r}"
                elif files and file is None:
                    lack = f"{images} is there, but not {' or '.join(files)}: put it in {folder}"
                yield Location(images, split, file), lack


def alternatives(names: str, split: str) -> list[str]:
    """List the names that a field of a layout holds for a split."""
    filled = names.format(split=split, domain=split.removesuffix("-test"))
    return filled.split("|") if filled else []


def _side_file(root: Path, folder: Path, images: Path, name: str) -> Path | None:
    """Find a side file beside the pictures, above them or at the root."""
    # From the pictures' folder up, below the root.
    homes = [images, *images.parents]
    below_root = homes.index(root) if root in homes else 1
    homes = homes[:below_root]
    # At the root, names like val.txt could be any dataset's.
    if folder == root or name.startswith(COOP):
        homes.append(root)

    for home in homes:
        for below in _SPLIT_FOLDERS:
            path = home / below / name
            if path.is_file():
                return path
    return None


def squeeze(name: str) -> str:
    """Reduce a name to lower-case letters and digits: ``Caltech-101`` is ``caltech101``."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def candidate_folders(root: Path, names: Sequence[str]) -> Iterator[Path]:
    """Find folders called like one of ``names``, ``root`` among them; names may be paths."""
    seen = set()
    for name in names:
        steps = [squeeze(step) for step in name.split("/")]
        folders = _descend(root, steps)

        # The root may be the dataset's own folder.
        if squeeze(root.absolute().name) == steps[0]:
            folders += _descend(root, steps[1:])
        for folder in folders:
            if folder not in seen:
                seen.add(folder)
                yield folder


def _descend(folder: Path, steps: Sequence[str]) -> list[Path]:
    """Find the folders below one that are called as the steps of a path say."""
    if not steps:
        return [folder]
    first, *rest = steps
    children = [path for path in folder.iterdir() if squeeze(path.name) == first]
    folders = []
    for child in sorted(children):
        if child.is_dir():
            folders += _descend(child, rest)
    return folders


@dataclass(frozen=True)
class Benchmark:
    """Dataset of the literature: an entry of ``facts.json``."""

    id: str
    summary: str
    # Names of its folder under the root; case, `-` and `_` do not count.
    folders: tuple[str, ...]
    # From the most to the least trusted.
    layouts: tuple[Layout, ...]
    # Images of each in a complete copy; the first is the default.
    splits: Mapping[str, int]
    get: str
    # Who made it, and on what terms it may be used.
    terms: str
    # Id of its class list (`catalogue`); empty for images of no class.
    class_list: str
    # Pitfalls of its labels, and how they are handled.
    traps: tuple[str, ...] = ()

    @property
    def default_split(self) -> str:
        """Split that the bare id stands for."""
        return next(iter(self.splits))

    @property
    def names(self) -> tuple[str, ...]:
        """Class list, empty for images of no class."""
        return class_names(self.class_list) if self.class_list else ()

    def _templates(self) -> tuple[str, ...]:
        """Return CoOp's template for this dataset; the plain one where CoOp has none."""
        try:
            return templates(template_choice("coop", self.id))
        except UnknownNameError:
            return templates("single")

    def find(self, root: Path, split: str | None = None) -> tuple[Layout, Location]:
        """Find the most trusted layout that has ``split`` under ``root``, and where."""
        split = split or self.default_split
        look_up(f"split of {self.id}", split, self.splits)
        if not root.is_dir():
            raise DataNotFoundError(
                f"no folder {root}: --root is where your datasets are"
            )
        lacks: dict[str, None] = {}
        layouts = []
        folders = list(self.folders)
        for layout in self.layouts:
            for location, lack in layout.locations(root, self.folders, split):
                if not lack:
                    return layout, location
                lacks[lack] = None

            files = " or ".join(alternatives(layout.files, split))
            layouts.append(f"{layout.name} with {files}" if files else layout.name)
            folders += alternatives(layout.folders, split)

        # Nothing fits: say where it was looked for, and what came close.
        close = f" {'. '.join(lacks)}." if lacks else ""
        message = (
            f"{self._id_of(split)} is not under {root}. Looked in folders named "
            f"{', '.join(folders)} for: {'; '.join(layouts)}.{close} {self.get}"
        )
        raise DataNotFoundError(message, list(lacks))

    def _id_of(self, split: str | None) -> str:
        """Name a split; the default one is called by the dataset's id alone."""
        return self.id if split in (None, self.default_split) else f"{self.id}/{split}"

    def require(self, root: Path | None, split: str | None = None) -> Path:
        """Return the root if ``split`` is under it, in any layout; else say how to get it."""
        if root is None:
            reason = "is not part of the package: name its root directory with --root"
            raise UserError(f"{self.id} {reason}. {self.get}")
        self.find(root, split)
        return root

    def read(self, root: Path, split: str | None = None) -> Listing:
        """Read the images of ``split`` with their labels."""
        layout, location = self.find(root, split)
        try:
            listing = layout.read(location)
        except ValueError as error:
            raise UserError(f"{self.id}: {error}") from error
        if not listing.keys:
            where = f"{location.images} ({listing.missing:,} were looked for)"
            raise DataNotFoundError(
                f"{self.id}: none of its images are in {where}. {self.get}"
            )
        return listing

    def build(
        self, root: Path | None, split: str | None, classes: Sequence[str] | None
    ) -> Dataset:
        """Build the dataset; warn if incomplete. ``classes`` are for images without a list."""
        listing = self.read(self.require(root, split), split)
        if not self.class_list and classes is None:
            reason = "has no classes of its own: it is for unknown images (--unknown)"
            raise NoClassNamesError(f"{self.id} {reason}")
        count = self.splits[split or self.default_split]
        if len(listing.keys) != count:
            warnings.warn(
                f"{self.id}: {len(listing.keys):,} images found, a complete copy has "
                f"{count:,}; cliquetta data doctor {root} says more",
                stacklevel=1,
            )
        id = self._id_of(split)

        facts: dict[str, Any] = {
            "names": self.names or classes,
            "keys": listing.keys,
            "labels": listing.labels if self.class_list else None,
            "templates": self._templates(),
        }
        if listing.images is not None:
            return ArrayDataset(id, listing.images, **facts)
        # Published numbers are of pixels as stored.
        return FileDataset(id, listing.paths, **facts, exif=False)
