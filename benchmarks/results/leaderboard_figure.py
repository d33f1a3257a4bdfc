"""The leaderboard as a picture: gain by kind of stream, the default method beside its best rivals.

Written as SVG by hand, so that equal records give equal bytes whatever is installed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.results.leaderboard import COLUMNS, BoardRow, recorded_columns
from benchmarks.results.texts import method_of
from cliquetta.evaluation.grid import BASELINE
from cliquetta.methods.building.registry import DEFAULT_METHOD
from cliquetta.report.style import COLOURS, FAINT, GRID, INK, PAPER

KINDS = tuple(column for column, (_, metric) in COLUMNS.items() if metric != "auroc")
RIVALS = 5
# of the cells that the best-covered method has; a rival with fewer is not drawn
SHARE = 0.8
# In pixels:
LEFT = 48  # of the axis
TOP = 92  # of the first board
BETWEEN = 62  # two boards
BAR = 11
GAP = 18  # between two kinds of stream
POINT = 6.0  # one point of gain
STEP = 5  # points of gain between two lines

Board = Mapping[str, BoardRow]


def leaderboard_figure(boards: Mapping[str, Board]) -> str:
    """Draw the boards by title, one below the other, as SVG."""
    by_method = {}
    kinds = {}
    for title, rows in boards.items():
        if rows:
            by_method[title] = {method_of(label): row for label, row in rows.items()}
            kinds[title] = [kind for kind in recorded_columns(rows) if kind in KINDS]
    methods = [DEFAULT_METHOD, *best_rivals(list(by_method.values()))]
    most_kinds = max(map(len, kinds.values()), default=0)
    width = LEFT + most_kinds * _group_width(methods) + 8

    parts = [_legend(methods)]
    top = TOP
    for title, rows in by_method.items():
        panel = _Panel(rows, methods, kinds[title], top, width)
        parts.append(panel.draw(title))
        top = round(panel.bottom) + BETWEEN
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'viewBox="0 0 {width} {top}" font-family="sans-serif" font-size="12" fill="{INK}">\n'
        f"<title>Gain over zero-shot by kind of stream</title>\n"
        f'<rect width="{width}" height="{top}" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


def best_rivals(boards: Sequence[Board]) -> list[str]:
    """Choose the rivals of highest mean gain among those that have most cells."""
    gains: dict[str, list[float]] = {}
    for rows in boards:
        for name, row in rows.items():
            of_kinds = [row.gain(kind) for kind in KINDS]
            measured = [gain for gain in of_kinds if gain is not None]
            gains.setdefault(name, []).extend(measured)

    most = max(map(len, gains.values()), default=0)
    enough = max(1, SHARE * most)
    means = {}
    for name, values in gains.items():
        if len(values) >= enough and name not in (DEFAULT_METHOD, BASELINE):
            means[name] = statistics.mean(values)
    return sorted(means, key=lambda name: -means[name])[:RIVALS]


def _group_width(methods: Sequence[str]) -> int:
    """Return width of the bars of one kind of stream, with the gap to the next."""
    return len(methods) * BAR + GAP


def _legend(methods: Sequence[str]) -> str:
    lines = [
        f'<text x="{LEFT}" y="24" font-size="17" font-weight="bold">'
        "Gain over zero-shot, by kind of stream</text>",
        f'<text x="{LEFT}" y="44" fill="{FAINT}">Points of accuracy (long tail: of macro-F1). '
        "Bars: mean over sets and seeds. Ticks: the set with the lowest gain. ×: not run, or only "
        "for batches.</text>",
    ]
    x = LEFT
    for index, name in enumerate(methods):
        weight = ' font-weight="bold"' if index == 0 else ""
        lines += [
            f'<rect x="{x}" y="58" width="12" height="12" fill="{COLOURS[index]}"/>',
            f'<text x="{x + 17}" y="69"{weight}>{escape(name)}</text>',
        ]
        x += 48 + 8 * len(name)
    return "\n".join(lines)


class _Panel:
    """One board: a group of bars per kind of stream, one bar per method."""

    def __init__(
        self,
        rows: Board,
        methods: Sequence[str],
        kinds: Sequence[str],
        top: int,
        width: int,
    ) -> None:
        self.rows = rows
        self.methods = methods
        self.kinds = kinds
        self.top = top
        self.width = width

        # The axis reaches from the lowest gain of any set to the highest mean.
        means = [0.0]
        lows = [0.0]
        for name in methods:
            if name not in rows:
                continue
            for kind in kinds:
                means.append(rows[name].gain(kind) or 0.0)
                if rows[name].measured(kind):
                    lowest, _ = rows[name].worst(kind)
                    lows.append(lowest)
        self.high = STEP * math.ceil(max(STEP, *means) / STEP)
        self.low = STEP * math.floor(min(-STEP, *lows) / STEP)
        self.zero = top + 20 + self.high * POINT
        self.bottom = self.height_of(self.low)

    def height_of(self, gain: float) -> float:
        """Return height on the page of a gain."""
        return self.zero - gain * POINT

    def draw(self, title: str) -> str:
        """Draw the title, the lines of the axis, and all groups."""
        parts = [
            f'<text x="{LEFT}" y="{self.top + 6}" font-weight="bold">{escape(title)}</text>'
        ]
        for mark in range(self.low, self.high + 1, STEP):
            parts += self._line(mark)
        for number, kind in enumerate(self.kinds):
            left = LEFT + GAP // 2 + number * _group_width(self.methods)
            middle = left + len(self.methods) * BAR / 2
            parts.append(
                f'<text x="{middle:g}" y="{self.bottom + 18:g}" text-anchor="middle">'
                f"{escape(kind)}</text>"
            )
            for index, name in enumerate(self.methods):
                parts += self._bar(name, kind, left + index * BAR, COLOURS[index])
        return "\n".join(parts)

    def _line(self, mark: int) -> list[str]:
        """Draw a line of the axis with its label."""
        y = self.height_of(mark)
        label = f"{mark:+d}" if mark else "0"
        colour = GRID if mark else INK
        return [
            f'<path d="M{LEFT} {y:g}H{self.width - 8}" stroke="{colour}"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:g}" text-anchor="end" fill="{FAINT}">{label}</text>',
        ]

    def _bar(self, name: str, kind: str, x: int, colour: str) -> list[str]:
        """Draw a gain, with a tick at the set with the lowest; a cross where there is none."""
        row = self.rows.get(name)
        gain = None if row is None else row.gain(kind)
        middle = x + BAR / 2
        if row is None or gain is None:
            return [
                f'<text x="{middle:g}" y="{self.zero - 3:g}" text-anchor="middle" '
                f'fill="{colour}">×</text>'
            ]
        lowest, _ = row.worst(kind)
        end = self.height_of(gain)
        tick = self.height_of(lowest)
        about = escape(f"{name}, {kind}: {gain:+.1f}")
        return [
            f'<rect x="{x + 1}" y="{min(end, self.zero):.1f}" width="{BAR - 2}" '
            f'height="{abs(end - self.zero):.1f}" fill="{colour}">'
            f"<title>{about}, lowest {lowest:+.1f}</title></rect>",
            f'<path d="M{middle:g} {end:.1f}V{tick:.1f}" stroke="{INK}" '
            f'stroke-width="0.7"/><path d="M{x + 2} {tick:.1f}h{BAR - 4}" stroke="{INK}" '
            f'stroke-width="1.8"/>',
        ]
