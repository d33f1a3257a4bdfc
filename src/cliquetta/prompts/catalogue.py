"""Class lists and templates: those of known datasets, and users' own."""

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from cliquetta.errors import UserError, look_up
from cliquetta.prompts.classes import DEFAULT_TEMPLATE, ClassPrompts


@lru_cache
def _read(name: str, section: str) -> dict[str, Any]:
    """Read a section of a packaged JSON file."""
    folder = files("cliquetta.prompts").joinpath("data")
    text = folder.joinpath(name).read_text(encoding="utf-8")
    document = json.loads(text)
    return dict(document[section])


def _class_lists() -> dict[str, Any]:
    return _read("classnames.json", "lists")


def list_class_lists() -> list[str]:
    """List the ids of all class lists."""
    return sorted(_class_lists())


def list_templates() -> list[str]:
    """List the ids of all template sets."""
    return sorted(_read("templates.json", "sets"))


def class_names(list_id: str) -> tuple[str, ...]:
    """Read the class names of a list by label; ImageNet's hold two duplicates."""
    entry = look_up("class list", list_id, _class_lists())
    if "subset_of" not in entry:
        return tuple(entry["names"])
    names = class_names(entry["subset_of"])
    return tuple(names[i] for i in indices(list_id))


def wnids(list_id: str) -> tuple[str, ...]:
    """Read the WordNet ids of a list of ImageNet classes, by label."""
    ids = {
        name: entry["wnids"]
        for name, entry in _class_lists().items()
        if "wnids" in entry
    }
    return tuple(look_up("class list with WordNet ids", list_id, ids))


def indices(list_id: str) -> tuple[int, ...]:
    """Find the classes of an ImageNet subset in the list of 1000."""
    entry = look_up("class list", list_id, _class_lists())
    superset = entry.get("subset_of", list_id)

    positions = {}
    for position, wnid in enumerate(wnids(superset)):
        positions[wnid] = position
    return tuple(positions[wnid] for wnid in wnids(list_id))


def templates(set_id: str) -> tuple[str, ...]:
    """Read the templates of a set; ``{}`` stands for the class name."""
    sets = _read("templates.json", "sets")
    entry = look_up("template set", set_id, sets)
    return tuple(entry["templates"])


def template_choice(scheme: str, dataset: str) -> str:
    """Choose the template set of a method (``coop``, ``tda``, ``scap``)."""
    choices = _read("templates.json", "choices")
    choice = look_up("choice of templates", scheme, choices)
    sets = choice["sets"]
    return str(look_up(f"dataset with templates of {scheme}", dataset, sets))


def read_prompts(
    classes: str | None, given_templates: Sequence[str] = ()
) -> ClassPrompts:
    """Read class names and templates as users write them.

    Args:
        classes: A file with one name per line, ``cat,dog,ship``, or a known list.
        given_templates: Texts with ``{}``, files with one per line, or known sets.

    """
    if classes is None or not classes.strip(" ,"):
        raise UserError(
            "no class names: give --classes names.txt (one per line), --classes cat,dog,ship or "
            "--classes imagenet"
        )
    texts = read_templates(given_templates)

    # A file, a known list, or names with commas between them.
    if _is_file(classes):
        names = text_lines(Path(classes))
        if not names:
            raise UserError(f"no class names in {classes}: write one per line")
        return ClassPrompts(tuple(names), texts)
    if classes in list_class_lists():
        return ClassPrompts(class_names(classes), texts, allow_duplicates=True)
    if "," not in classes and (Path(classes).suffix or "/" in classes):
        raise UserError(f"no file {classes} with class names")
    stripped = [name.strip() for name in classes.split(",")]
    names = [name for name in stripped if name]
    return ClassPrompts(tuple(names), texts)


def read_templates(choices: Sequence[str]) -> tuple[str, ...]:
    """Read templates: texts, files (one per line), sets such as ``openai-80``."""
    texts: list[str] = []
    for value in choices:
        if "{}" in value:
            texts.append(value)
        elif _is_file(value):
            texts += text_lines(Path(value))
        elif value in list_templates():
            texts += templates(value)
        else:
            raise UserError(
                f"no template set or file {value!r}: write a template with {{}} for the class "
                f"name, name a file of them, or one of {', '.join(list_templates())}"
            )
    return tuple(texts) or (DEFAULT_TEMPLATE,)


def text_lines(path: Path) -> list[str]:
    """Read the lines of a text file that are neither empty nor comments (``# ...``)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text with one entry per line") from None
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _is_file(text: str) -> bool:
    """Return whether text names a file, also if it cannot even be a path."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False
