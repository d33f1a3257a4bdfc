"""README's picture: gains of a few methods as horizontal bars, with labels for a phone's width.

Written as SVG by hand, so that equal records give equal bytes whatever is installed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cliquetta.report.style import COLOURS, FAINT, GRID, INK, PAPER

WIDTH = 480
FONT = 18  # 13 pixels where a phone shows the picture 360 pixels wide
LABELS = 150  # width of the methods' names
MARGIN = 56  # for a figure beside the longest bar
BAR = 16
ROW_GAP = 18
LEGEND = 30
TITLE = 34


@dataclass(frozen=True)
class Bars:
    """Gains of one method, one per kind of images; ``None`` where it was not run."""

    method: str
    gains: tuple[float | None, ...]


def headline_figure(kinds: Sequence[str], rows: Sequence[Bars]) -> str:
    """Draw the gains of some methods by kinds of images."""
    known = [gain for row in rows for gain in row.gains if gain is not None]
    lowest = min([0.0, *known])
    highest = max([0.0, *known])
    room = WIDTH - LABELS - MARGIN
    scale = room / max(highest - lowest, 1.0)
    zero = LABELS - lowest * scale

    parts = [
        f'<text x="8" y="24" font-size="{FONT + 2}" font-weight="bold">'
        "Points over zero-shot, ViT-B/16</text>"
    ]
    top = TITLE
    for index, kind in enumerate(kinds):
        parts.append(_legend_entry(kind, index, top))
        top += LEGEND
    first = top
    for row in rows:
        parts.append(_row(row, top, zero, scale))
        top += len(kinds) * BAR + ROW_GAP
    axis = f'<path d="M{zero:.1f} {first - 4}V{top - ROW_GAP + 4}" stroke="{GRID}"/>'
    body = "\n".join([*parts, axis])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" '
        f'viewBox="0 0 {WIDTH} {top}" font-family="sans-serif" font-size="{FONT}" '
        f'fill="{INK}">\n'
        "<title>Gain over zero-shot by method</title>\n"
        f'<rect width="{WIDTH}" height="{top}" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


def _legend_entry(kind: str, index: int, top: int) -> str:
    return (
        f'<rect x="8" y="{top + 2}" width="18" height="18" fill="{COLOURS[index]}"/>'
        f'<text x="34" y="{top + 17}">{escape(kind)}</text>'
    )


def _row(row: Bars, top: int, zero: float, scale: float) -> str:
    """Draw the name of a method and its bars."""
    middle = top + len(row.gains) * BAR / 2 + FONT / 3
    parts = [f'<text x="8" y="{middle:.1f}">{escape(row.method)}</text>']
    for index, gain in enumerate(row.gains):
        y = top + index * BAR
        if gain is None:
            parts.append(
                f'<text x="{zero + 6:.1f}" y="{y + 13}" font-size="14" fill="{FAINT}">'
                "not run</text>"
            )
            continue
        length = abs(gain) * scale
        left = zero if gain >= 0 else zero - length
        end = max(left + length, zero) + 6
        parts.append(
            f'<rect x="{left:.1f}" y="{y + 1}" width="{length:.1f}" height="{BAR - 2}" '
            f'fill="{COLOURS[index]}"/>'
            f'<text x="{end:.1f}" y="{y + 13}" font-size="14">{gain:+.1f}</text>'
        )
    return "\n".join(parts)
