"""What makes a data set known: its places, layouts, parts, classes and counts, in one entry."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cliquetta.data.benchmarks.place import Layout, Listing, Place, find_places, near_misses
from cliquetta.data.dataset import ArrayDataset, Dataset, FileDataset
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.prompts.catalogue import class_names, template_choice, templates


class DataNotFoundError(UserError):
    """A data set that is not under the root; says where it was looked for and how to get it."""


@dataclass(frozen=True)
class Benchmark:
    """One known data set. Adding one is adding one of these."""

    id: str
    summary: str
    folders: tuple[str, ...]
    """What its folder may be called under the root; case, ``-`` and ``_`` do not count."""
    layouts: tuple[Layout, ...]
    """From the most to the least trusted."""
    parts: Mapping[str, int]
    """Images of each part in a complete copy; the first part is meant when none is named."""
    get: str
    """How to get it."""
    terms: str
    """Who made it, and on what terms it may be used."""
    class_list: str
    """Id of its class list (:mod:`cliquetta.prompts.catalogue`)."""
    traps: tuple[str, ...] = ()
    """What goes wrong elsewhere with its labels, and what is done here."""

    @property
    def default_part(self) -> str:
        """The part that the bare id stands for."""
        return next(iter(self.parts))

    @property
    def names(self) -> tuple[str, ...]:
        """The class list."""
        return class_names(self.class_list)

    @property
    def templates(self) -> tuple[str, ...]:
        """CoOp's template for this data set; the plain one where CoOp has none."""
        try:
            return templates(template_choice("coop", self.id))
        except UnknownNameError:
            return templates("single")

    def check_part(self, part: str | None) -> str:
        """The name of a part, the default one for ``None``."""
        if part is not None and part not in self.parts:
            raise UnknownNameError(f"part of {self.id}", part, self.parts)
        return part or self.default_part

    def find(self, root: Path, part: str | None = None) -> tuple[Layout, Place]:
        """The layout and place of ``part`` under ``root``."""
        part = self.check_part(part)
        if not root.is_dir():
            raise DataNotFoundError(f"no folder {root}: --root names the folder of your data sets")
        found = next(find_places(root, self.folders, self.layouts, part), None)
        if found is None:
            raise DataNotFoundError(self._not_found(root, part))
        return found

    def list(self, root: Path, part: str | None = None) -> Listing:
        """The images of ``part`` with their labels."""
        layout, place = self.find(root, part)
        try:
            listing = layout.read(place)
        except ValueError as error:
            raise UserError(f"{self.id}: {error}") from error
        if not listing.keys:
            raise DataNotFoundError(
                f"{self.id}: none of its images are in {place.images} "
                f"({listing.missing:,} were looked for). {self.get}"
            )
        return listing

    def build(self, root: Path, part: str | None = None) -> Dataset:
        """The data set; warns if the copy is not complete."""
        part = self.check_part(part)
        listing = self.list(root, part)
        if len(listing.keys) != self.parts[part]:
            warnings.warn(
                f"{self.id}: {len(listing.keys):,} images found, a complete copy has "
                f"{self.parts[part]:,}; cliquetta data doctor {root} says more",
                stacklevel=1,
            )
        id = self.id if part == self.default_part else f"{self.id}/{part}"
        if listing.images is not None:
            return ArrayDataset(
                id,
                listing.images,
                names=self.names,
                keys=listing.keys,
                labels=list(listing.labels),
                templates=self.templates,
            )
        return FileDataset(
            id,
            listing.paths,
            names=self.names,
            keys=listing.keys,
            labels=list(listing.labels),
            templates=self.templates,
            exif=False,  # published numbers were taken on pixels as stored
        )

    def _not_found(self, root: Path, part: str) -> str:
        """One sentence each: what was looked for, what was nearly there, how to get it."""
        looked = "; ".join(self._describe(layout) for layout in self.layouts)
        special = [name.format(part=part) for one in self.layouts for name in one.folders]
        folders = ", ".join([*self.folders, *special])
        nearly = near_misses(root, self.folders, self.layouts, part)
        close = f" {'. '.join(nearly)}." if nearly else ""
        what = self.id if part == self.default_part else f"{self.id}/{part}"
        return (
            f"{what} is not under {root}. Looked in folders named {folders} for: "
            f"{looked}.{close} {self.get}"
        )

    @staticmethod
    def _describe(layout: Layout) -> str:
        files = f" with {' or '.join(layout.files)}" if layout.files else ""
        return f"{layout.name}{files}"
