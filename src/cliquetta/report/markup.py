"""Pieces of HTML, every text in them escaped."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

from cliquetta.decimals import decimal
from cliquetta.report.style import Figure, to_svg

_WIDE_INCHES = 5  # width from which on a figure takes the whole line
_REM_PER_INCH = 7.4


def esc(value: object) -> str:
    """Escape a text for HTML, also inside of attributes."""
    return escape(str(value), quote=True)


def number(value: float | None, digits: int = 2, *, signed: bool = False) -> str:
    """Write a figure of a table; a dash where there is none."""
    if value is None or value != value:
        return "–"
    return decimal(value, digits, signed=signed).replace("-", "−")


def count(amount: int, noun: str, plural: str = "") -> str:
    """Write an amount with its noun: ``1 image``, ``2,000 images``."""
    return f"{amount:,} {noun if amount == 1 else plural or f'{noun}s'}"


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    labels: int = 1,
) -> str:
    """Render a table; the first ``labels`` columns name the row, the others hold numbers."""
    sides = [""] * labels + [' class="number"'] * (len(columns) - labels)
    # Cells of numbers are named after their column, which phones show beside them.
    names = [esc(name) for name in columns]
    head = ""
    for side, name in zip(sides, names, strict=True):
        head += f'<th scope="col"{side}>{name}</th>'
    body = ""
    for first, *others in rows:
        body += f'<tr><th scope="row">{esc(first)}</th>'
        for side, name, text in zip(sides[1:], names[1:], others, strict=True):
            body += f'<td{side} data-column="{name}">{esc(text)}</td>'
        body += "</tr>"
    title = f"<caption>{esc(caption)}</caption>" if caption else ""
    label = esc(caption or columns[0])
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def cards(entries: Sequence[tuple[str, str]]) -> str:
    """Render large figures with what they mean: ``(figure, meaning)``."""
    items = ""
    for value, meaning in entries:
        items += f"<li><b>{esc(value)}</b><span>{esc(meaning)}</span></li>"
    return f'<ul class="cards">{items}</ul>'


def details(summary: str, body: str) -> str:
    """Render a part that opens on demand; ``body`` is HTML."""
    return f"<details><summary>{esc(summary)}</summary>{body}</details>"


def frame(
    title: str,
    lead: str,
    sections: Sequence[tuple[str, str]],
    notes: Sequence[str],
    *,
    style: str = "",
    script: str = "",
    maker: str = "cliquetta report",
) -> str:
    """Make a page of sections of HTML; other texts are plain.

    ``style`` adds rules. ``script`` is the one script that browsers may run, by its
    hash.
    """
    css = files("cliquetta.report").joinpath("page.css").read_text(encoding="utf-8")
    links = ""
    body = ""
    for index, (name, content) in enumerate(sections):
        links += f'<li><a href="#part-{index}">{esc(name)}</a></li>'
        body += (
            f'<section id="part-{index}" aria-labelledby="title-{index}">'
            f'<h2 id="title-{index}">{esc(name)}</h2>{content}</section>'
        )

    remarks = "".join(f'<p class="note">{esc(note)}</p>' for note in notes)
    # The policy forbids the page to fetch anything: what is not in the file is not
    # shown.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    code = ""
    if script:
        digest = hashlib.sha256(script.encode()).digest()
        script_hash = base64.b64encode(digest).decode()
        policy += f"; script-src 'sha256-{script_hash}'"
        code = f"<script>{script}</script>\n"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{esc(title)}</title>
<link rel="icon" href="data:,">
<style>
{css}{style}</style>
</head>
<body>
<header><h1>{esc(title)}</h1><p class="lead">{esc(lead)}</p>{remarks}
<nav aria-label="Contents"><ul>{links}</ul></nav></header>
<main>{body}</main>
<footer><p>Made by <code>{maker}</code>; everything shown is in this one file.</p></footer>
{code}</body>
</html>
"""


@dataclass
class PageFigures:
    """The figures of a page by name; each is rendered once."""

    drawn: dict[str, Figure] = field(default_factory=dict)
    rendered: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, draw: Callable[[], Figure], alt: str, caption: str) -> str:
        """Render the figure of this name, drawn the first time; ``caption`` is plain text."""
        if name not in self.rendered:
            figure = draw()
            self.drawn[name] = figure
            inches = figure.get_size_inches()[0]
            wide = ' class="wide"' if inches > _WIDE_INCHES else ""
            svg = to_svg(figure, alt, f"f{len(self.rendered)}")
            self.rendered[name] = (
                f'<figure{wide} style="max-width:{inches * _REM_PER_INCH:.0f}rem">{svg}'
                f"<figcaption>{esc(caption)}</figcaption></figure>"
            )
        return self.rendered[name]
