"""Known datasets: folders, layouts, splits, classes and counts of each in one entry."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cliquetta.data.benchmarks.location import (
    Layout,
    Listing,
    Location,
    find_locations,
    near_misses,
)
from cliquetta.data.dataset import ArrayDataset, Dataset, FileDataset
from cliquetta.data.files import NoClassNamesError
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.prompts.catalogue import class_names, template_choice, templates


class DataNotFoundError(UserError):
    """A dataset that is not under the root; says where it was looked for and how to get it."""


@dataclass(frozen=True)
class Benchmark:
    """One known dataset: an entry of ``facts.json`` and its layouts."""

    id: str
    summary: str
    folders: tuple[str, ...]
    """Names of its folder under the root; case, ``-`` and ``_`` do not count."""
    layouts: tuple[Layout, ...]
    """From the most to the least trusted."""
    splits: Mapping[str, int]
    """Images of each split in a complete copy; the first split is meant when none is named."""
    get: str
    """How to get it."""
    terms: str
    """Who made it, and on what terms it may be used."""
    class_list: str
    """Id of its class list (:mod:`cliquetta.prompts.catalogue`); empty for images of no class."""
    traps: tuple[str, ...] = ()
    """Pitfalls of its labels, and how they are handled."""

    @property
    def default_split(self) -> str:
        """The split that the bare id stands for."""
        return next(iter(self.splits))

    @property
    def names(self) -> tuple[str, ...]:
        """The class list."""
        return class_names(self.class_list) if self.class_list else ()

    @property
    def templates(self) -> tuple[str, ...]:
        """CoOp's template for this dataset; the plain one where CoOp has none."""
        try:
            return templates(template_choice("coop", self.id))
        except UnknownNameError:
            return templates("single")

    def check_split(self, split: str | None) -> str:
        """The name of a split, the default one for ``None``."""
        if split is not None and split not in self.splits:
            raise UnknownNameError(f"split of {self.id}", split, self.splits)
        return split or self.default_split

    def find(self, root: Path, split: str | None = None) -> tuple[Layout, Location]:
        """The layout and location of ``split`` under ``root``."""
        split = self.check_split(split)
        if not root.is_dir():
            raise DataNotFoundError(f"no folder {root}: --root is where your datasets are")
        found = next(find_locations(root, self.folders, self.layouts, split), None)
        if found is None:
            raise DataNotFoundError(self._not_found(root, split))
        return found

    def list(self, root: Path, split: str | None = None) -> Listing:
        """The images of ``split`` with their labels."""
        layout, location = self.find(root, split)
        try:
            listing = layout.read(location)
        except ValueError as error:
            raise UserError(f"{self.id}: {error}") from error
        if not listing.keys:
            raise DataNotFoundError(
                f"{self.id}: none of its images are in {location.images} "
                f"({listing.missing:,} were looked for). {self.get}"
            )
        return listing

    def build(
        self, root: Path, split: str | None = None, classes: Sequence[str] | None = None
    ) -> Dataset:
        """The dataset; warns if it is incomplete. ``classes`` are for images without a list."""
        split = self.check_split(split)
        listing = self.list(root, split)
        if not self.class_list and classes is None:
            raise NoClassNamesError(
                f"{self.id} has no classes of its own: it is for unknown images (--unknown)"
            )
        if len(listing.keys) != self.splits[split]:
            warnings.warn(
                f"{self.id}: {len(listing.keys):,} images found, a complete copy has "
                f"{self.splits[split]:,}; cliquetta data doctor {root} says more",
                stacklevel=1,
            )
        id = self.id if split == self.default_split else f"{self.id}/{split}"
        facts: dict[str, Any] = {
            "names": self.names or classes,
            "keys": listing.keys,
            "labels": list(listing.labels) if self.class_list else None,
            "templates": self.templates,
        }
        if listing.images is not None:
            return ArrayDataset(id, listing.images, **facts)
        # published numbers were taken on pixels as stored
        return FileDataset(id, listing.paths, **facts, exif=False)

    def _not_found(self, root: Path, split: str) -> str:
        """One sentence each: what was looked for, what was nearly there, how to get it."""
        looked = "; ".join(
            layout.name + (f" with {' or '.join(layout.files)}" if layout.files else "")
            for layout in self.layouts
        )
        special = [name.format(split=split) for one in self.layouts for name in one.folders]
        folders = ", ".join([*self.folders, *special])
        nearly = near_misses(root, self.folders, self.layouts, split)
        close = f" {'. '.join(nearly)}." if nearly else ""
        what = self.id if split == self.default_split else f"{self.id}/{split}"
        return (
            f"{what} is not under {root}. Looked in folders named {folders} for: "
            f"{looked}.{close} {self.get}"
        )
