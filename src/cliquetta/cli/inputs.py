"""What users give on a command line, read and checked: images, class names, templates, options."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cliquetta.errors import UserError
from cliquetta.prompts.catalogue import class_names, list_class_lists, list_templates, templates

if TYPE_CHECKING:  # what loads torch is imported when it is needed: `--help` does without
    from cliquetta.methods.base import Adapter
    from cliquetta.model.clip import CLIP
    from cliquetta.prompts.classes import ClassPrompts

_PATH_COLUMNS = ("path", "file", "filename", "image")


@dataclass(frozen=True)
class FoundImages:
    """The files to predict, each once, in the order in which they were named."""

    paths: tuple[Path, ...]
    repeated: int
    """How often a path was named again."""


def find_inputs(sources: Sequence[Path]) -> FoundImages:
    """Images of folders (with their sub-folders), files, and CSV files with a column of paths.

    A file that is named outright is taken as an image whatever its ending; whether it is one
    turns out when it is opened. Paths in a CSV count from the folder of the CSV.
    """
    from cliquetta.data.folder import EXTENSIONS, find_images

    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            images = find_images(source)
            if not images:
                kinds = ", ".join(sorted(EXTENSIONS))
                raise UserError(f"no images in {source}: looked for {kinds} in it and below")
            found += images
        elif not source.exists():
            raise UserError(f"no such file or folder: {source}")
        elif source.suffix.lower() in {".csv", ".tsv"}:
            found += _paths_of_table(source)
        else:
            found.append(source)
    unique = tuple(dict.fromkeys(found))
    return FoundImages(unique, len(found) - len(unique))


def _paths_of_table(table: Path) -> list[Path]:
    delimiter = "\t" if table.suffix.lower() == ".tsv" else ","
    with table.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, delimiter=delimiter)
        columns = {name.strip().lower(): name for name in rows.fieldnames or ()}
        column = next((columns[name] for name in _PATH_COLUMNS if name in columns), None)
        if column is None:
            raise UserError(
                f"{table} has no column of paths: its first line must hold one named "
                f"{' or '.join(_PATH_COLUMNS)}, found {', '.join(columns) or 'nothing'}"
            )
        values = [(row[column] or "").strip() for row in rows]
    if not any(values):
        raise UserError(f"{table} lists no images in its column {column!r}")
    return [table.parent / value for value in values if value]


def read_classes(given: str | None) -> tuple[tuple[str, ...], bool]:
    """Class names of a file (one a line), of ``a,b,c`` or of a known list, and if it may repeat.

    Only a known list may: that of ImageNet holds two names twice.
    """
    if given is None or not given.strip():
        raise UserError(
            "no class names: give --classes names.txt (one a line), --classes cat,dog,ship or "
            "--classes imagenet"
        )
    path = Path(given)
    if _is_file(path):
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise UserError(f"{path} is not UTF-8 text: class names go one a line") from None
        names = tuple(line.strip() for line in lines if line.strip())
        if not names:
            raise UserError(f"no class names in {path}: write one a line")
        return names, False
    if "," in given:
        return tuple(name.strip() for name in given.split(",") if name.strip()), False
    if given in list_class_lists():
        return class_names(given), True
    if path.suffix or "/" in given:
        raise UserError(f"no file {given} with class names")
    return (given.strip(),), False


def read_templates(given: Sequence[str]) -> tuple[str, ...]:
    """Templates written out, in a file (one a line), or of a known set such as ``openai-80``."""
    from cliquetta.prompts.classes import DEFAULT_TEMPLATE

    found: list[str] = []
    for value in given:
        if "{}" in value:
            found.append(value)
        elif _is_file(Path(value)):
            lines = Path(value).read_text(encoding="utf-8-sig").splitlines()
            found += [line.strip() for line in lines if line.strip()]
        elif value in list_templates():
            found += templates(value)
        else:
            raise UserError(
                f"no template set or file {value!r}: write a template with {{}} for the class "
                f"name, name a file of them, or one of {', '.join(list_templates())}"
            )
    return tuple(found) or (DEFAULT_TEMPLATE,)


def _is_file(path: Path) -> bool:
    """Whether it is one; text that cannot even be a path (too long, a NUL) is not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_prompts(classes: str | None, given_templates: Sequence[str]) -> ClassPrompts:
    """The class list with its templates, checked."""
    from cliquetta.prompts.classes import ClassPrompts

    names, duplicates = read_classes(classes)
    return ClassPrompts(names, read_templates(given_templates), allow_duplicates=duplicates)


def read_settings(given: Sequence[str]) -> dict[str, str]:
    """``key=value`` pairs of ``--set``."""
    pairs = {}
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes key=value, got {setting!r}")
        pairs[key.strip()] = value.strip()
    return pairs


@dataclass(frozen=True)
class MethodChoice:
    """A method with its settings, or a fitted file that holds both."""

    name: str
    config: Any
    fitted: Path | None = None

    def build(self, model: CLIP, prompts: ClassPrompts, seed: int) -> Adapter:
        """The adapter for a model and a class list."""
        from cliquetta.methods._shared.fewshot_io import create_fitted
        from cliquetta.methods.registry import create_method

        if self.fitted is not None:
            return create_fitted(self.fitted, model, prompts, seed=seed)
        return create_method(self.name, model, prompts, self.config, seed=seed)


def read_method(
    name: str | None, preset: str | None, settings: Sequence[str], fitted: Path | None
) -> MethodChoice:
    """The method that was asked for, zero-shot if none; a fitted file brings its settings along."""
    from cliquetta.methods._shared.fewshot_io import load_fitted
    from cliquetta.methods.registry import method_config

    if fitted is None:
        name = name or "zero_shot"
        return MethodChoice(name, method_config(name, preset, read_settings(settings)))
    if preset is not None or settings:
        raise UserError(f"{fitted} was fitted with its settings: leave out --preset and --set")
    found = load_fitted(fitted)
    if name not in (None, found.method):
        raise UserError(f"{fitted} was fitted for {found.method}: leave out --method {name}")
    return MethodChoice(found.method, found.config, fitted)


def split_list(given: str, what: str) -> list[str]:
    """The parts of ``a,b,c``, each once; empty lists are refused."""
    parts = list(dict.fromkeys(part.strip() for part in given.split(",") if part.strip()))
    if not parts:
        raise UserError(f"no {what} given")
    return parts
