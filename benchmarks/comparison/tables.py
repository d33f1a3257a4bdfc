"""Tables of accuracy records: means, spread, gains over zero-shot and a paired test."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

import numpy as np

Cell = Mapping[str, Any]

EXACT = 16
"""Up to this many pairs all sign flips are enumerated."""
DRAWS = 200_000
"""Random sign flips beyond."""
ENOUGH = 6
"""Sets from which on the paired test takes sets as its units: seeds share their pictures."""


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of a paired permutation test: each difference might have had the other sign.

    Exact up to ``EXACT`` pairs, else by ``DRAWS`` seeded draws. Differences of zero say nothing.
    """
    values = np.array([d for d in differences if abs(d) > 1e-9])
    n = len(values)
    if n == 0:
        return 1.0
    if n <= EXACT:
        flips = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    else:
        flips = np.random.default_rng(0).integers(0, 2, size=(DRAWS, n), dtype=np.int8)
    sums = np.abs((1.0 - 2.0 * flips) @ values)
    found = int((sums >= abs(values.sum()) - 1e-9).sum())
    return found / len(sums) if n <= EXACT else (found + 1) / (DRAWS + 1)


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation, 0 of a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def paired_p(cells: Sequence[Cell]) -> tuple[float, str]:
    """P of the gains of one method over zero-shot on the same images, and what was paired."""
    by_set: dict[str, list[float]] = defaultdict(list)
    for cell in cells:
        by_set[cell["set"]].append(cell["gain"])
    if len(by_set) >= ENOUGH:
        return sign_flip_p([mean(gains) for gains in by_set.values()]), f"{len(by_set)} sets"
    return sign_flip_p([c["gain"] for c in cells]), f"{len(cells)} runs"


def summarise(cells: Sequence[Cell]) -> dict[str, Any]:
    """One row: a method over the sets and seeds of one setting.

    ``mean`` is over sets and seeds, ``sd`` that of the mean over sets from seed to seed. Clean sets
    stand apart: they count for nothing but their own columns, unless there is nothing else.
    """
    shifted = [c for c in cells if c["kind"] != "clean"] or list(cells)
    report = [c for c in shifted if c["kind"] == "report"]
    by_seed: dict[int, list[float]] = defaultdict(list)
    by_set: dict[str, list[Cell]] = defaultdict(list)
    for cell in shifted:
        by_seed[cell["seed"]].append(cell["top1"])
    for cell in cells:
        by_set[cell["set"]].append(cell)
    gains = {name: mean(c["gain"] for c in group) for name, group in by_set.items()}
    shifted_gains = [gains[name] for name in dict.fromkeys(c["set"] for c in shifted)]
    p, unit = paired_p(shifted)
    return {
        "method": cells[0]["method"],
        "runs": len(cells),
        "mean": mean(c["top1"] for c in shifted),
        "sd": spread([mean(values) for values in by_seed.values()]),
        "gain": mean(shifted_gains),
        "gain_sd_over_sets": spread(shifted_gains),
        "gain_report": mean(c["gain"] for c in report) if report else None,
        "worst": min(gains.values()),
        "p": p,
        "paired": unit,
        "ece": mean(c["ece"] for c in shifted),
        "images_per_s": median(c["images_per_s"] for c in cells),
        "images": round(mean(c["images"] for c in cells)),
        "sets": {
            name: {
                "top1": mean(c["top1"] for c in group),
                "sd": spread([c["top1"] for c in group]),
                "gain": gains[name],
                "seeds": len(group),
                "segments": _mean_segments(group),
            }
            for name, group in by_set.items()
        },
    }


def _mean_segments(group: Sequence[Cell]) -> list[float]:
    """Gain in each stretch of a stream that changes its domain."""
    return [mean(gains) for gains in zip(*(c["segment_gains"] for c in group), strict=True)]


def group_settings(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by setting (world, stream, batch, views ...), in order of appearance."""
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if "top1" in cell:
            found[cell["setting"]].append(cell)
    return dict(found)


def markdown(cells: Sequence[Cell], skipped: Mapping[str, str]) -> str:
    """The table of one setting; zero-shot first, then by mean gain."""
    by_method: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_method[cell["method"]].append(cell)
    rows = [summarise(group) for group in by_method.values()]
    rows.sort(key=lambda row: (row["method"] != "zero_shot", -row["gain"]))
    sets = list(dict.fromkeys(cell["set"] for cell in cells))
    kinds = {cell["set"]: cell["kind"] for cell in cells}
    mark = {"dev": " (dev)", "clean": " (clean)", "report": ""}
    head = ["method", "accuracy", "gain", "gain, not dev", "worst set", "p", "ECE", "images/s"]
    head += [name + mark[kinds[name]] for name in sets]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    most, size = max(row["runs"] for row in rows), max(row["images"] for row in rows)
    for row in rows:
        name = row["method"] if row["runs"] == most else f"{row['method']} (incomplete)"
        if row["images"] < 0.95 * size:
            name += f" ({row['images']} images a set)"
        report = row["gain_report"]
        values = [
            name,
            f"{row['mean']:.2f} ± {row['sd']:.2f}",
            f"{row['gain']:+.2f} ± {row['gain_sd_over_sets']:.2f}",
            "" if report is None else f"{report:+.2f}",
            f"{row['worst']:+.2f}",
            "" if row["method"] == "zero_shot" else f"{row['p']:.3g}",
            f"{row['ece']:.1f}",
            _three_digits(row["images_per_s"]),
        ]
        values += [_set_cell(row["sets"].get(name)) for name in sets]
        lines.append("| " + " | ".join(values) + " |")
    units = ", ".join(sorted({row["paired"] for row in rows}))
    lines += [
        "",
        "Accuracy in percent: mean over shifted sets and seeds ± sd of that mean over seeds. Gain: "
        "points over zero-shot on the same images ± sd over sets; (dev) sets are those on which "
        "settings may be chosen, (clean) ones enter only their own column and the worst set. p: "
        f"paired sign-flip test of the gains, two-sided, over {units}. Images/s: pixels and views "
        "already on the device.",
    ]
    lines += [f"- not run: {name}: {reason}" for name, reason in skipped.items()]
    return "\n".join(lines)


def _set_cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    text = f"{entry['top1']:.1f}" + (f" ± {entry['sd']:.1f}" if entry["sd"] else "")
    if len(entry["segments"]) > 1:
        text += " (" + " / ".join(f"{gain:+.1f}" for gain in entry["segments"]) + ")"
    return text


def _three_digits(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{digits}f}"
