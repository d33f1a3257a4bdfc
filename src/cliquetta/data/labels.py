"""Class lists and labels of anybody's own data, from what stands beside the images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cliquetta.data.dataset import UNKNOWN
from cliquetta.data.folder import natural_key
from cliquetta.errors import UserError

CLASS_FILES = ("classnames.txt", "classes.txt", "class_names.txt", "labels.txt")
TEMPLATE_FILES = ("zeroshot_classification_templates.txt", "templates.txt")


def read_beside(folder: Path, names: Sequence[str]) -> tuple[str, ...] | None:
    """The lines of the first of some text files in ``folder``; ``None`` if there is none."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        return None
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def number_labels(
    said: Sequence[str | None], names: Sequence[str] | None, source: str
) -> tuple[tuple[str, ...], list[int] | None]:
    """The class list, and a label for each of ``said``: a class name, a number, or unknown.

    Numbers count the class list from 0. Without ``names`` the classes are what is said, in natural
    order; numbers then name nothing and are refused. Labels are ``None`` if nobody said anything.
    """
    known = [value for value in said if value is not None]
    numbers = bool(known) and all(value.isdecimal() for value in known)
    if names is None and (numbers or not known):
        what = "labels are numbers" if known else "there are no labels"
        raise UserError(
            f"{source}: {what}, so that the classes have no names: write them, one a line, into "
            f"{CLASS_FILES[0]} beside it"
        )
    names = tuple(sorted(set(known), key=natural_key)) if names is None else tuple(names)
    if not known:
        return names, None
    if numbers:
        labels = [UNKNOWN if value is None else int(value) for value in said]
        if max(labels) >= len(names):
            raise UserError(f"{source}: label {max(labels)}, but {len(names)} class names")
        return names, labels
    number = {_plain(name): label for label, name in enumerate(names)}
    strangers = [value for value in known if _plain(value) not in number]
    if strangers:
        raise UserError(f"{source}: class {strangers[0]!r} is not in the class list")
    return names, [UNKNOWN if value is None else number[_plain(value)] for value in said]


def _plain(name: str) -> str:
    return name.strip().replace("_", " ").lower()
