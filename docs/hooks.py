"""Parts of the documentation site that come from the code, so that no page repeats it by hand.

The navigation lists every registered method; a method's page gets its recorded figures
(its program and settings stand in the file, see ``benchmarks.results.method_pages``); the
API page lists ``cliquetta.__all__``.
"""

import re
from collections.abc import Sequence
from functools import cache
from html import escape, unescape
from pathlib import Path
from typing import Any

import cliquetta
from benchmarks.results import method_pages
from benchmarks.results.grid_files import grid_file
from cliquetta.methods.building.registry import MethodEntry, method_entries

DOCS = Path(__file__).parent


def page_of(name: str) -> str | None:
    """The page of a method, relative to docs/: its own, or the one whose heading names it."""
    page = method_pages.page_of(name, DOCS / "methods")
    return None if page is None else page.relative_to(DOCS).as_posix()


def recorded(entry: MethodEntry) -> str:
    """The rows of this method in the tables of the comparison, zero-shot beside it."""
    page = (DOCS / "methods" / "README.md").read_text(encoding="utf-8")
    parts: list[str] = []
    heading = ""
    for block in re.split(r"\n\n+", page):
        lines = block.splitlines()
        if lines[0].startswith("#"):
            heading = lines[0].lstrip("# ")
        if len(lines) > 2 and re.fullmatch(r"[|\s:-]+", lines[1]):
            own = [line for line in lines[2:] if _names(line, entry.name)]
            plain = [line for line in lines[2:] if _names(line, "zero_shot")]
            if own:
                both = plain + [line for line in own if line not in plain]
                parts.append("\n".join([f"*{heading}*", "", *lines[:2], *both]))
    if not parts:
        return "Not in the recorded comparison yet."
    more = "\n\nColumns are explained in [the comparison](README.md)."
    return "\n\n".join(parts[:3]) + more


@cache
def _boards() -> dict[str, Any]:
    """The rows of every recorded board, by title."""
    from benchmarks.results.leaderboard import BOARDS, board_rows
    from cliquetta.evaluation.grid import grid_roles
    from cliquetta.evaluation.record import unpack_records

    files = {grid: DOCS / "results" / f"{grid}.json" for grid in BOARDS}
    return {
        BOARDS[grid]: board_rows(unpack_records(path), grid_roles(grid_file(grid)))
        for grid, path in files.items()
        if path.exists()
    }


def board_sentences(entry: MethodEntry) -> str:
    """Where a method gains and where it loses, by the recorded boards: its paper reports gains."""
    from benchmarks.results.leaderboard import method_sentence

    found = [
        f"*{title}*: {sentence}"
        for title, rows in _boards().items()
        if entry.name != "zero_shot" and (sentence := method_sentence(rows, entry.name))
    ]
    head = (
        "On [the board of streams](../results/leaderboard.md), in points, "
        "mean over sets and seeds:"
    )
    return "\n\n".join([head, *found]) if found else ""


def _names(row: str, name: str) -> bool:
    return re.match(rf"\| \[?`{name}(:paper)?`", row) is not None


def method_page(text: str, entries: Sequence[MethodEntry]) -> str:
    """A page with what was recorded of its methods at the head of a section."""
    gains = [
        part for e in entries for part in (recorded(e), board_sentences(e)) if part
    ]
    heading = "\n## What it costs and gains\n"
    if heading not in text:
        place = text.find("\n## Reference\n")
        place = len(text) if place < 0 else place
        text = f"{text[:place].rstrip()}\n{heading}\n{text[place:]}"
    before, own = text.split(heading, 1)
    return before + heading + "\n" + "\n\n".join([*gains, own.lstrip("\n")])


def _without_outside_links(text: str, page: Path) -> str:
    """Links to files of the repository that are no pages of the site become plain words."""

    def keep(match: re.Match[str]) -> str:
        target = (page.parent / match[2].split("#")[0]).resolve()
        pages = target.suffix in {".md", ".png", ".svg"} and target.is_relative_to(DOCS)
        excluded = (
            target.is_relative_to(DOCS / "results")
            and target.parent != DOCS / "results"
        )
        return match[0] if pages and not excluded else match[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)", keep, text)


def api_page() -> str:
    """The reference of every public name."""
    homes = [(getattr(cliquetta, name).__module__, name) for name in cliquetta.__all__]
    head = ["# API reference", "Everything here is imported from `cliquetta`."]
    return "\n\n".join([*head, *(f"::: {module}.{name}" for module, name in homes)])


def on_config(config: Any) -> Any:
    """Fill the navigation with the pages of methods."""
    pages = {page_of(entry.name) for entry in method_entries()} - {None}
    listed = [
        {"The methods compared": "methods/README.md"},
        *sorted(str(p) for p in pages),
    ]
    for part in config.nav:
        if "Methods" in part:
            part["Methods"] = listed
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are generated as a whole."""
    from mkdocs.structure.files import File

    changes = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "api.md", content=api_page()))
    files.append(File.generated(config, "changes.md", content=changes))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the pages of methods; links to files of the repository become plain names."""
    entries = [e for e in method_entries() if page_of(e.name) == page.file.src_uri]
    if entries:
        markdown = method_page(markdown, entries)
    columns = [
        line.count("|") - 1 for line in re.findall(r"^\|(?:[ :-]+\|)+$", markdown, re.M)
    ]
    if max(columns, default=0) >= LOOKS[-1][0]:
        page.meta["hide"] = ["toc"]  # wide tables take the room of the contents
    return _without_outside_links(markdown, DOCS / page.file.src_uri)


LOOKS = ((12, "cards"), (8, "small"))
"""Looks of tables (see site.css) by the number of columns from which they have them."""


def label_cells(html: str) -> str:
    """Name the column of every cell of a table, which phones show instead of a row of headings."""

    def label_table(match: re.Match[str]) -> str:
        table = match[0]
        names = [
            _text(head) for head in re.findall(r"<th[^>]*>(.*?)</th>", table, re.S)
        ]

        def label_row(row: re.Match[str]) -> str:
            columns = iter(names)
            return re.sub(
                r"<td([^>]*)>(.*?)</td>",
                lambda cell: (
                    f'<td{cell[1]} data-label="{escape(next(columns, ""))}">'
                    f"<div>{cell[2]}</div></td>"
                ),
                row[0],
                flags=re.S,
            )

        labelled = re.sub(r"<tr>.*?</tr>", label_row, table, flags=re.S)
        look = next((look for most, look in LOOKS if len(names) >= most), None)
        return (
            labelled
            if look is None
            else labelled.replace("<table", f'<table data-look="{look}"')
        )

    return re.sub(r"<table>.*?</table>", label_table, html, flags=re.S)


def _text(html: str) -> str:
    """The words of a piece of HTML."""
    return unescape(re.sub(r"<[^>]+>", "", html)).strip()


def on_page_content(html: str, **_: Any) -> str:
    """Cells get labels; roles of reStructuredText in docstrings leave only what they name."""
    html = label_cells(html)
    return re.sub(r":(?:class|meth|func|data|attr|mod):(?=<code>)", "", html)
