"""The leaderboard as a picture: gain by kind of stream, the default method beside its best rivals.

Written as SVG by hand, so that equal records give equal bytes whatever is installed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.results.leaderboard import COLUMNS, BoardRow, recorded_columns
from benchmarks.results.results_pages import method_of
from cliquetta.evaluation.grid import BASELINE
from cliquetta.methods.registry import DEFAULT_METHOD
from cliquetta.report.style import COLOURS, FAINT, GRID, INK, PAPER

KINDS = tuple(column for column, (_, metric) in COLUMNS.items() if metric != "auroc")
RIVALS = 5
# of the cells that the best-covered method has; a rival with fewer is not drawn
SHARE = 0.8
LEFT, TOP, BETWEEN, BAR, GAP, POINT = (
    48,
    92,
    62,
    11,
    18,
    6.0,
)  # pixels; POINT: of one point of gain
STEP = 5  # points between two lines

Board = Mapping[str, BoardRow]


def leaderboard_figure(boards: Mapping[str, Board]) -> str:
    """An SVG of the boards by title, one below the other."""
    named = {
        title: {method_of(label): row for label, row in rows.items()}
        for title, rows in boards.items()
        if rows
    }
    methods = [DEFAULT_METHOD, *best_rivals(list(named.values()))]
    group = len(methods) * BAR + GAP
    kinds = {
        title: [c for c in recorded_columns(board) if c in KINDS]
        for title, board in boards.items()
    }
    width = LEFT + max(map(len, kinds.values()), default=0) * group + 8
    parts, top = [_legend(methods)], TOP
    for title, rows in named.items():
        height, panel = _panel(title, rows, methods, kinds[title], top, width)
        parts.append(panel)
        top += height + BETWEEN
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'viewBox="0 0 {width} {top}" font-family="sans-serif" font-size="12" fill="{INK}">\n'
        f"<title>Gain over zero-shot by kind of stream</title>\n"
        f'<rect width="{width}" height="{top}" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


def best_rivals(boards: Sequence[Board]) -> list[str]:
    """The rivals of highest mean gain over all cells, among those that have most of them."""
    gains: dict[str, list[float]] = {}
    for rows in boards:
        for name, row in rows.items():
            known = [gain for kind in KINDS if (gain := row.gain(kind)) is not None]
            gains.setdefault(name, []).extend(known)
    most = max(map(len, gains.values()), default=0)
    able = {
        name: own for name, own in gains.items() if len(own) >= max(1, SHARE * most)
    }
    rivals = [name for name in able if name not in (DEFAULT_METHOD, BASELINE)]
    return sorted(rivals, key=lambda name: -statistics.mean(able[name]))[:RIVALS]


def _legend(methods: Sequence[str]) -> str:
    lines = [
        f'<text x="{LEFT}" y="24" font-size="17" font-weight="bold">'
        "Gain over zero-shot, by kind of stream</text>",
        f'<text x="{LEFT}" y="44" fill="{FAINT}">Points of accuracy (long tail: of macro-F1). '
        "Bars: mean over sets and seeds. Ticks: the set with the lowest gain. ×: not run, or only "
        "for batches.</text>",
    ]
    at = LEFT
    for index, name in enumerate(methods):
        weight = ' font-weight="bold"' if index == 0 else ""
        lines += [
            f'<rect x="{at}" y="58" width="12" height="12" fill="{COLOURS[index]}"/>',
            f'<text x="{at + 17}" y="69"{weight}>{escape(name)}</text>',
        ]
        at += 48 + 8 * len(name)
    return "\n".join(lines)


def _panel(
    title: str,
    rows: Board,
    names: Sequence[str],
    kinds: Sequence[str],
    top: int,
    width: int,
) -> tuple[int, str]:
    """Height and drawing of one board."""
    shown = [rows[name] for name in names if name in rows]
    means = [row.gain(kind) or 0.0 for row in shown for kind in kinds]
    lows = [row.worst(kind)[0] for row in shown for kind in kinds if row.measured(kind)]
    high = STEP * math.ceil(max([STEP, *means]) / STEP)
    low = STEP * math.floor(min([-STEP, *lows]) / STEP)
    zero = top + 20 + high * POINT

    def height_of(gain: float) -> float:
        return zero - gain * POINT

    bottom = height_of(low)
    parts = [
        f'<text x="{LEFT}" y="{top + 6}" font-weight="bold">{escape(title)}</text>'
    ]
    for mark in range(low, high + 1, STEP):
        y, label = height_of(mark), f"{mark:+d}" if mark else "0"
        colour = GRID if mark else INK
        parts += [
            f'<path d="M{LEFT} {y:g}H{width - 8}" stroke="{colour}"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:g}" text-anchor="end" fill="{FAINT}">{label}</text>',
        ]
    group = len(names) * BAR + GAP
    for number, kind in enumerate(kinds):
        left = LEFT + GAP // 2 + number * group
        middle = left + len(names) * BAR / 2
        parts.append(
            f'<text x="{middle:g}" y="{bottom + 18:g}" text-anchor="middle">{escape(kind)}</text>'
        )
        for index, name in enumerate(names):
            row, x = rows.get(name), left + index * BAR
            gain = None if row is None else row.gain(kind)
            if row is None or gain is None:
                parts.append(
                    f'<text x="{x + BAR / 2:g}" y="{zero - 3:g}" text-anchor="middle" '
                    f'fill="{COLOURS[index]}">×</text>'
                )
                continue
            ends = sorted([height_of(gain), zero])
            worst, about = height_of(row.worst(kind)[0]), f"{name}, {kind}: {gain:+.1f}"
            parts.append(
                f'<rect x="{x + 1}" y="{ends[0]:.1f}" width="{BAR - 2}" '
                f'height="{ends[1] - ends[0]:.1f}" fill="{COLOURS[index]}">'
                f"<title>{escape(about)}, lowest {row.worst(kind)[0]:+.1f}</title></rect>"
            )
            parts.append(
                f'<path d="M{x + BAR / 2:g} {height_of(gain):.1f}V{worst:.1f}" stroke="{INK}" '
                f'stroke-width="0.7"/><path d="M{x + 2} {worst:.1f}h{BAR - 4}" stroke="{INK}" '
                f'stroke-width="1.8"/>'
            )
    return round(bottom) - top, "\n".join(parts)
