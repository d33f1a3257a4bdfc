"""The comparison page of all methods, written from recorded results.

    python benchmarks/comparison_page.py --bundled DIR .. --real DIR .. --more DIR .. --speed FILE
    python benchmarks/comparison_page.py ... --corruptions DIR --shifts DIR   # and the README
    python benchmarks/comparison_page.py            # again, from the records that the page names
    python benchmarks/comparison_page.py --check    # 1 if the page is not what they say

DIR is a folder written by ``accuracy.py``, FILE the ``methods_speed.json`` of ``methods_speed.py``.
Folders of one option are put together; where two hold the same run, the later folder counts. The
setting with most methods makes the large tables, others (streams, batch sizes) and ``--more``
folders get a short one each. With ``--corruptions DIR --shifts DIR`` (both worlds under shift, some
methods) the README's first table is written, too. Paths are kept relative to the repository.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison.headline import headline, insert
from comparison.page import Records, write_page
from comparison.settings import Setting
from comparison.tables import Cell, by_key, group_settings

from cliquetta.methods.registry import list_methods

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "methods" / "README.md"
README = ROOT / "README.md"
PROGRAM = "python benchmarks/comparison_page.py"


def read_cells(folders: Sequence[Path]) -> list[Cell]:
    """All finished cells; of two of the same setting, set, method and seed the later one.

    A method whose cells were run with different configs is refused: their mean means nothing.
    """
    found: dict[tuple[Any, ...], Cell] = {}
    for folder in folders:
        path = folder / "cells.jsonl"
        if not path.exists():
            raise SystemExit(f"no cells.jsonl in {folder}: give folders that accuracy.py wrote")
        for line in path.read_text(encoding="utf-8").splitlines():
            cell = json.loads(line)
            found[cell["setting"], cell["set"], cell["method"], cell["seed"]] = cell
    cells = list(found.values())
    for setting, group in group_settings(cells).items():
        for label, own in by_key(group, "method").items():
            if len({json.dumps(cell["config"], sort_keys=True) for cell in own}) > 1:
                raise SystemExit(
                    f"{label} was run with different configs in one setting ({setting}): give only "
                    "folders that belong together, others with --more"
                )
    return cells


def read_settings(folders: Sequence[Path], *, named: bool = False) -> list[Setting]:
    """The settings of some folders, that with most methods first; ``named`` by folder, too."""
    not_run: dict[str, str] = {}
    for folder in folders:
        path = folder / "results.json"
        if path.exists():
            not_run |= json.loads(path.read_text(encoding="utf-8")).get("not_run", {})
    found = [
        Setting(f"{folders[0].name}: {title}" if named else title, cells, not_run)
        for title, cells in group_settings(read_cells(folders)).items()
    ]
    return sorted(found, key=lambda setting: -len(setting.rows))


def page_links(out: Path) -> dict[str, str]:
    """For each method the page of its name or else of its module, as a link from ``out``."""
    found = {}
    for entry in list_methods():
        for stem in (entry.name, entry.adapter.__module__.rpartition(".")[2]):
            path = PAGE.parent / f"{stem}.md"
            if path.exists() and entry.name not in found:
                found[entry.name] = link(path, out)
    return found


def link(path: Path, out: Path) -> str:
    """``path`` as a link from the page."""
    return Path(os.path.relpath(path, out.parent)).as_posix()


def sources(options: argparse.Namespace) -> list[str]:
    """A list of the folders, each with date, hardware and command as recorded."""
    lines = []
    folders = [*options.bundled, *options.real, *options.more]
    folders += [folder for folder in (options.corruptions, options.shifts) if folder is not None]
    for folder in dict.fromkeys(folders):
        made = dict.fromkeys(str(cell["made"]) for cell in read_cells([folder]))
        lines.append(f"- [{folder.name}]({link(folder, options.out)})")
        lines += [f"  - {text}" for text in made]
    if options.speed is not None:
        about = read_speed(options.speed)["about"]
        where = f"{options.speed.parent.name}/{options.speed.name}"
        lines += [f"- [{where}]({link(options.speed, options.out)})", f"  - {about}."]
    return ["\n".join(lines)]


def read_speed(path: Path) -> Any:
    """What ``methods_speed.py`` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def make_page(options: argparse.Namespace) -> str:
    """The page as the records have it."""
    bundled, *others = read_settings(options.bundled)
    real, *further = read_settings(options.real) if options.real else [None]
    others += [setting for setting in further if setting is not None]
    for folder in options.more:
        others += read_settings([folder], named=True)
    speed = None if options.speed is None else read_speed(options.speed)
    records = Records(bundled, real, others, speed, page_links(options.out))
    return write_page(records, sources(options), command_of(options))


def make_readme(options: argparse.Namespace) -> str:
    """The README with its first table as the records have it."""
    speed = None if options.speed is None else read_speed(options.speed)
    table = headline(read_cells([options.corruptions]), read_cells([options.shifts]), speed)
    return insert(options.readme.read_text(encoding="utf-8"), table)


def command_of(options: argparse.Namespace) -> str:
    """The command that writes this page, from the root of the repository."""
    lines = [PROGRAM]
    for name in ("bundled", "real", "more", "speed", "corruptions", "shifts", "out", "readme"):
        value = getattr(options, name)
        paths = value if isinstance(value, list) else [value]
        if paths and paths[0] is not None and value not in (PAGE, README):
            words = " ".join(shlex.quote(_from_root(path)) for path in paths)
            lines.append(f"--{name} {words}")
    return " \\\n    ".join(lines)


def _from_root(path: Path) -> str:
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def named_inputs(page: Path) -> list[str]:
    """The arguments that the page at ``page`` says it was written with."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    commands = re.findall(rf"```console\n({re.escape(PROGRAM)} .*?)\n```", text, re.S)
    if not commands:
        raise SystemExit(f"{page} names no command of its own: give --bundled DIR and the others")
    words = shlex.split(commands[-1].replace("\\\n", " "))[2:]
    return [word if word.startswith("--") else str(ROOT / word) for word in words]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundled", type=Path, nargs="+", default=[], help="accuracy.py, micro")
    parser.add_argument("--real", type=Path, nargs="+", default=[], help="accuracy.py, real")
    parser.add_argument("--more", type=Path, nargs="+", default=[], help="short tables")
    parser.add_argument("--speed", type=Path, help="methods_speed.json")
    parser.add_argument("--corruptions", type=Path, help="accuracy.py, micro; for the README")
    parser.add_argument("--shifts", type=Path, help="accuracy.py, real; for the README")
    parser.add_argument("--readme", type=Path, default=README, help="where the first table stands")
    parser.add_argument("--out", type=Path, default=PAGE, help="docs/methods/README.md")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    if not options.bundled:
        if options.real or options.more or options.speed or options.corruptions or options.shifts:
            parser.error("--bundled DIR is needed, too, or nothing: then the page's own records")
        kept = ["--out", str(options.out), *(["--check"] if options.check else [])]
        kept += ["--readme", str(options.readme)]
        options = parser.parse_args([*named_inputs(options.out), *kept])
    if (options.corruptions is None) != (options.shifts is None):
        parser.error("the README's table needs both --corruptions DIR and --shifts DIR")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    texts = {options.out: make_page(options)}
    if options.corruptions is not None:
        texts[options.readme] = make_readme(options)
    if options.check:
        return max(differs(path, text) for path, text in texts.items())
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


def differs(path: Path, wanted: str) -> int:
    """1 and a printed diff if the file is not what the records say."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text == wanted:
        return 0
    changes = difflib.unified_diff(text.splitlines(), wanted.splitlines(), "page", "records", n=0)
    print("\n".join(changes))
    print(f"{path} is not what the records say: run {PROGRAM} and commit it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
