"""Index of the methods: names, presets and options without an import of torch."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path

from cliquetta.errors import UserError

PLUG_INS = "cliquetta.methods"
"""Entry points of other packages: modules that register methods."""
PLUG_IN_FILES = "CLIQUETTA_PLUGINS"
"""Environment variable of files that register methods; child processes read it."""
INDEX_FILE = Path("src/cliquetta/methods/data/index.json")
"""The index in a clone of the repository, written by ``python -m benchmarks.results methods``."""
_REGISTERED = re.compile(r'@register\(\s*"([^"]+)"')


@dataclass(frozen=True)
class IndexEntry:
    """What a method can be asked for."""

    presets: Sequence[str]
    options: Sequence[str]


def method_names() -> list[str]:
    """Return the names that our own modules register, read from their source."""
    names: list[str] = []
    pending = [files("cliquetta.methods")]
    while pending:
        for entry in pending.pop().iterdir():
            if entry.is_dir() and not entry.name.startswith("_"):
                pending.append(entry)
            elif entry.name.endswith(".py"):
                names += _REGISTERED.findall(entry.read_text(encoding="utf-8"))
    return sorted(names)


@cache
def method_index() -> Mapping[str, IndexEntry]:
    """Return the packaged index by method; newer methods are not in it."""
    path = files("cliquetta.methods").joinpath("data/index.json")
    text = path.read_text(encoding="utf-8")
    entries = json.loads(text)
    return {name: IndexEntry(**entry) for name, entry in entries.items()}


def has_plug_ins() -> bool:
    """Return whether anything beside this package registers methods."""
    return bool(plug_in_files()) or bool(entry_points(group=PLUG_INS))


def plug_in_files() -> list[Path]:
    """Return the files of methods that the environment names."""
    named = os.environ.get(PLUG_IN_FILES, "")
    return [Path(name) for name in named.split(os.pathsep) if name]


def name_plug_in_files(paths: Sequence[Path | str]) -> None:
    """Name files of methods in the environment, beside those that it names already.

    Args:
        paths: Python files that call :func:`cliquetta.register` when they are imported.

    Raises:
        UserError: There is no such file.

    """
    files = dict.fromkeys(plug_in_files())
    for path in paths:
        file = Path(path).expanduser().resolve()
        if file.suffix != ".py" or not file.is_file():
            raise UserError(
                f"no plug-in {path}: name a Python file that registers a method"
            )
        files[file] = None
    os.environ[PLUG_IN_FILES] = os.pathsep.join(map(str, files))


def index_text(entries: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> str:
    """Write the index: presets and options of every method, one method per line."""
    lines = []
    for name, (presets, options) in sorted(entries.items()):
        entry = {"presets": list(presets), "options": list(options)}
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
