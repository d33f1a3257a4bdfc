"""The README's first table: what adapting gains under shift, on both worlds, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from comparison.settings import BASELINE, BLANK
from comparison.tables import Cell, by_key, grid, summarise, three_digits

BEGIN, END = "<!-- headline: written by benchmarks/comparison_page.py -->", "<!-- /headline -->"


def headline(
    corruptions: Sequence[Cell], shifts: Sequence[Cell], speed: Mapping[str, Any] | None
) -> str:
    """A row per method; of ``shifts`` only the sets on which nothing was chosen."""
    shifts = [cell for cell in shifts if cell["kind"] != "dev"]
    left, right = (by_key(cells, "method") for cells in (corruptions, shifts))
    costs = {} if speed is None else {row["method"]: row["x encoding"] for row in speed["rows"]}
    counts = [
        len({c["set"] for c in cells if c["kind"] != "clean"}) for cells in (corruptions, shifts)
    ]
    head = ["method", f"bundled set, {counts[0]} shifts", "worst", "clean"]
    head += [f"real tower, {counts[1]} shifts", "worst", "clean", "cost"]
    names = sorted(
        set(left) & set(right),
        key=lambda name: (name != BASELINE, -mean(c["gain"] for c in right[name])),
    )
    rows = [
        [f"`{name}`", *_columns(left[name]), *_columns(right[name]), _cost(costs.get(name))]
        for name in names
    ]
    return "\n".join(grid(head, rows))


def _columns(cells: Sequence[Cell]) -> list[str]:
    """Accuracy with its gain, the worst shift, and the clean sets, of one method in one world."""
    row = summarise(cells)
    clean = {cell["set"] for cell in cells if cell["kind"] == "clean"}
    gains = [entry["gain"] for name, entry in row["sets"].items() if name not in clean]
    kept = [entry for name, entry in row["sets"].items() if name in clean]
    if row["method"] == BASELINE:
        level = f"{mean(entry['top1'] for entry in kept):.1f}" if kept else BLANK
        return [f"{row['mean']:.2f}", BLANK, level]
    # Adding zero turns -0.0 into 0.0.
    change = f"{round(mean(entry['gain'] for entry in kept), 1) + 0.0:+.1f}" if kept else BLANK
    return [f"{row['mean']:.2f} ({row['gain']:+.2f})", f"{min(gains):+.2f}", change]


def _cost(value: float | None) -> str:
    return BLANK if value is None else f"{three_digits(value)} ×"


def insert(text: str, table: str) -> str:
    """``text`` with the table between its two marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"the README needs one line {BEGIN!r} and one {END!r}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
