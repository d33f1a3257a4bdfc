"""One look for all figures: colours that colour-blind readers and grey printers can tell apart.

Colour never stands alone: lines differ in dash and marker as well.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cliquetta.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # matplotlib is an extra: its types are imported from here
    Axes = Figure = object

INK = "#1c2127"  # text and axes
FAINT = "#6b7480"  # secondary text, reference lines
GRID = "#d3d8de"
PAPER = "#ffffff"
_THEMED = {
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    GRID: "var(--grid)",
    PAPER: "var(--card)",
}
"""Colours that follow the page when it is shown dark."""

# Okabe and Ito's palette without its yellow, which white paper swallows.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (9, 3)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
SEQUENTIAL = "viridis"
DIVERGING = "PuOr"


def line_look(index: int) -> dict[str, Any]:
    """Colour, dash and marker of the line at an index; no two of the first 35 are alike."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


_INKED = (
    "axes.edgecolor",
    "axes.labelcolor",
    "text.color",
    "xtick.color",
    "ytick.color",
)
_SETTINGS: Any = {  # matplotlib types its keys from some version on
    **dict.fromkeys(_INKED, INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.7,
    "font.family": "sans-serif",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.fontsize": 9,
    "image.cmap": SEQUENTIAL,
    "svg.fonttype": "none",
    "svg.hashsalt": "cliquetta",
}
BASELINE_LOOK: dict[str, Any] = {"color": FAINT, "linestyle": (0, (3, 3)), "marker": ""}
"""Zero-shot, in every figure."""


def can_draw() -> bool:
    """Return whether matplotlib is there."""
    return find_spec("matplotlib") is not None


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """Open a figure in our look, drawn without a screen; ``width`` and ``height`` in inches."""
    if not can_draw():
        raise UserError(
            "figures need matplotlib: install it with pip install 'cliquetta[report]'"
        )
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        yield Figure(figsize=(width, height), layout="constrained")


def to_svg(figure: Figure, alt: str, prefix: str) -> str:
    """Write the figure as SVG for a page: accessible, in the page's colours and font.

    ``prefix`` keeps the ids of several figures on one page apart.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Images are named by a hash of their pixels, twice where two are alike; nothing
    # refers to them.
    text = re.sub(r'(<image\b[^>]*?) id="[^"]*"', r"\1", text)
    text = re.sub(r'\b(id="|url\(#|href="#)', rf"\1{prefix}-", text)
    for colour, themed in _THEMED.items():
        text = text.replace(colour, themed)
    text = re.sub(r"(font: (?:[\w.]+ )*[\d.]+px) [^;\"]*", r"\1 var(--sans)", text)
    head, body = text.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(alt)}">{body}'.strip()


def to_file(figure: Figure, kind: str) -> bytes:
    """Write the figure as ``png`` (200 dpi) or ``pdf``, on white."""
    import matplotlib

    file = io.BytesIO()
    metadata = {"CreationDate": None} if kind == "pdf" else None
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(file, format=kind, dpi=200, facecolor=PAPER, metadata=metadata)
    return file.getvalue()
