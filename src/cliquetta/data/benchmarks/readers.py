"""Readers of the layouts that several datasets share: split files, lists, class folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cliquetta.data.benchmarks.place import Listing, Place, squeeze
from cliquetta.data.files import natural_key, walk_images
from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import class_names, wnids

LabelOf = Callable[[str], int | None]
"""The label of a folder or class name, ``None`` if there is none."""


def by_wnid(list_id: str) -> LabelOf:
    """Folders named by WordNet id, whatever subset of ImageNet they are."""
    return {wnid: label for label, wnid in enumerate(wnids(list_id))}.get


def by_number(count: int) -> LabelOf:
    """Folders named 0 ... count - 1, read as numbers: sorted as strings, 10 comes before 2."""

    def label_of(name: str) -> int | None:
        return int(name) if name.isdecimal() and int(name) < count else None

    return label_of


def by_name(list_id: str, aliases: Mapping[str, str] | None = None) -> LabelOf:
    """Folders named by class; case and punctuation do not count. ``aliases``: folder to class."""
    labels = {squeeze(name): label for label, name in enumerate(class_names(list_id))}
    for folder, name in (aliases or {}).items():
        labels[squeeze(folder)] = labels[squeeze(name)]
    return lambda name: labels.get(squeeze(name))


def by_words(list_id: str) -> LabelOf:
    """Folders named by class with the words in any order (cars: the year first or last)."""
    labels = {_words(name): label for label, name in enumerate(class_names(list_id))}
    return lambda name: labels.get(_words(name))


def _words(name: str) -> tuple[str, ...]:
    blanks = "".join(letter if letter.isalnum() else " " for letter in name.lower())
    return tuple(sorted(blanks.split()))


def first_of(*rules: LabelOf) -> LabelOf:
    """The label by the first rule that knows the name."""

    def label_of(name: str) -> int | None:
        return next((label for rule in rules if (label := rule(name)) is not None), None)

    return label_of


def class_folders(
    label_of: LabelOf, *, leave_out: Sequence[str] = (), hint: str = ""
) -> Callable[[Place], Listing]:
    """One folder per class. A folder that is no class is refused: labels would shift unseen."""

    def read(place: Place) -> Listing:
        pictures: list[tuple[int, str, Path]] = []
        dropped = []
        for folder in sorted(place.images.iterdir(), key=lambda path: natural_key(path.name)):
            if not folder.is_dir() or folder.name.startswith((".", "__")):
                continue
            if folder.name in leave_out:
                dropped.append(folder.name)
                continue
            label = label_of(folder.name)
            if label is None:
                raise UserError(f"{folder} is not one of the classes{hint and '; '}{hint}")
            pictures += [
                (label, path.relative_to(place.images).as_posix(), path)
                for path in walk_images(folder)
            ]
        pictures.sort(key=lambda picture: picture[0])  # stable: natural order within a class
        notes = (f"left out: {', '.join(dropped)}",) if dropped else ()
        return Listing(
            keys=[key for _, key, _ in pictures],
            labels=[label for label, _, _ in pictures],
            paths=[path for _, _, path in pictures],
            notes=notes,
        )

    return read


def several(folders: Mapping[str, Sequence[str]], list_id: str) -> Callable[[Place], Listing]:
    """One of several sets of class folders, or all of them in a row; each may have other names."""
    read_one = class_folders(by_name(list_id))

    def read(place: Place) -> Listing:
        wanted = folders if place.split == "all" else {place.split: folders[place.split]}
        found = {
            split: read_one(Place(place.root, place.folder, path, split))
            for split, names in wanted.items()
            for path in [place.images / name for name in names if (place.images / name).is_dir()][
                :1
            ]
        }
        return Listing(
            keys=[f"{split}/{key}" for split, one in found.items() for key in one.keys],
            labels=[label for one in found.values() for label in one.labels],
            paths=[path for one in found.values() for path in one.paths],
        )

    return read


def coop_split(
    file: str, list_id: str, *, locate: Callable[[Place], Callable[[str], Path]] | None = None
) -> Callable[[Place], Listing]:
    """A split of CoOp: ``{"train" | "val" | "test": [[path, label, class name], ...]}``.

    Every label is checked against our class list. ``locate`` finds a path of the split in copies
    that are not laid out like the original.
    """

    def read(place: Place) -> Listing:
        path = place.need(file)
        rows = _read_split(path, place.split)
        names = class_names(list_id)
        for _, label, name in rows:
            if not 0 <= label < len(names) or squeeze(names[label]) != squeeze(name):
                known = names[label] if 0 <= label < len(names) else "no class"
                raise UserError(
                    f"{path} calls class {label} {name!r}, our list calls it {known!r}; "
                    "is it the split file of another dataset?"
                )
        at = locate(place) if locate else place.images.joinpath
        return listed([(key, label) for key, label, _ in rows], at)

    return read


def _read_split(path: Path, split: str) -> list[tuple[str, int, str]]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))[split]
        return [(str(file), int(label), str(name)) for file, label, name in listed]
    except KeyError:
        raise UserError(f"{path} has no split {split!r}") from None
    except (ValueError, TypeError):
        raise UserError(
            f"{path} is not a split file of CoOp (JSON of [path, label, class name]); "
            "was it downloaded whole?"
        ) from None


def listed(rows: Iterable[tuple[str, int]], locate: Callable[[str], Path]) -> Listing:
    """Pictures that a list names: those on disk, each once; the rest is counted."""
    rows = list(rows)
    unique = dict(rows)
    paths = {key: locate(key) for key in unique}
    there = _on_disk(paths.values())
    kept = [key for key, path in paths.items() if path in there]
    repeated = len(rows) - len(unique)
    notes = (f"{repeated} files are listed twice and counted once",) if repeated else ()
    return Listing(
        keys=kept,
        labels=[unique[key] for key in kept],
        paths=[paths[key] for key in kept],
        missing=len(unique) - len(kept),
        notes=notes,
    )


def _on_disk(paths: Iterable[Path]) -> set[Path]:
    """Which of ``paths`` exist, with one look at each folder instead of one at each file."""
    paths = list(paths)
    content: dict[Path, set[str]] = {}
    for folder in {path.parent for path in paths}:
        content[folder] = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    return {path for path in paths if path.name in content[path.parent]}
