"""Anybody's folder of images as a data set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cliquetta.data.dataset import FileDataset
from cliquetta.errors import UserError
from cliquetta.prompts.classes import DEFAULT_TEMPLATE

EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
)


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sorts "2" before "10": runs of digits count as numbers."""
    parts = re.split(r"(\d+)", text)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part.lower()) for part in parts]


def find_images(folder: Path) -> list[Path]:
    """All files under ``folder`` that are named like images, in natural order; no hidden ones."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    found = [
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    ]
    return sorted(found, key=lambda path: natural_key(path.relative_to(folder).as_posix()))


def folder_dataset(
    folder: Path, names: Sequence[str] | None = None, templates: Sequence[str] = (DEFAULT_TEMPLATE,)
) -> FileDataset:
    """Images of ``folder``; sub-folders are classes, if there are any.

    ``names`` fixes the class list and its order; sub-folders must then be among them. A folder
    without sub-folders is unlabelled and needs ``names``.
    """
    paths = find_images(folder)
    if not paths:
        raise UserError(f"no images in {folder} (looked for {', '.join(sorted(EXTENSIONS))})")
    keys = [path.relative_to(folder).as_posix() for path in paths]
    owners = [key.partition("/")[0] if "/" in key else "" for key in keys]
    classes = sorted(set(owners) - {""}, key=natural_key)
    id = f"folder:{folder.as_posix()}"
    if not classes:
        if names is None:
            raise UserError(f"{folder} has no sub-folders to name its classes: give class names")
        return FileDataset(id, paths, names=names, keys=keys, labels=None, templates=templates)
    if "" in owners:
        loose = keys[owners.index("")]
        raise UserError(f"{folder} holds class folders and loose images ({loose}); move those")
    names = [name.replace("_", " ") for name in classes] if names is None else list(names)
    number = {name.replace("_", " ").lower(): label for label, name in enumerate(names)}
    unknown = [name for name in classes if name.replace("_", " ").lower() not in number]
    if unknown:
        raise UserError(f"folder {unknown[0]!r} of {folder} is not in the class list")
    labels = [number[owner.replace("_", " ").lower()] for owner in owners]
    return FileDataset(id, paths, names=names, keys=keys, labels=labels, templates=templates)
