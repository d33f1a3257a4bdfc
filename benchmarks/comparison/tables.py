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
    gains = set_means(cells, "gain")
    if len(gains) >= ENOUGH:
        return sign_flip_p(list(gains.values())), f"{len(gains)} sets"
    return sign_flip_p([c["gain"] for c in cells]), f"{len(cells)} runs"


def by_key(cells: Sequence[Cell], key: str) -> dict[str, list[Cell]]:
    """Cells by one of their entries, in order of appearance."""
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell[key]].append(cell)
    return dict(found)


def set_means(cells: Sequence[Cell], what: str) -> dict[str, float]:
    """For each set the mean over seeds: a set with fewer seeds counts as much as any other."""
    return {name: mean(c[what] for c in group) for name, group in by_key(cells, "set").items()}


def seed_spread(cells: Sequence[Cell]) -> float:
    """Sd from seed to seed of the mean accuracy over the sets that have all seeds."""
    found = {
        name: {c["seed"]: c["top1"] for c in group} for name, group in by_key(cells, "set").items()
    }
    seeds = max(found.values(), key=len).keys()
    whole = [values for values in found.values() if values.keys() >= seeds]
    return spread([mean(values[seed] for values in whole) for seed in seeds])


def summarise(cells: Sequence[Cell]) -> dict[str, Any]:
    """One row: a method over the sets and seeds of one setting.

    Means are over sets, of means over seeds. Clean sets stand apart: they count for nothing but
    their own columns and the worst set, unless there is nothing else.
    """
    shifted = [c for c in cells if c["kind"] != "clean"] or list(cells)
    report = [c for c in shifted if c["kind"] == "report"]
    by_set, gains = by_key(cells, "set"), set_means(cells, "gain")
    shifted_gains = set_means(shifted, "gain").values()
    worst = min(gains, key=lambda name: gains[name])
    p, unit = paired_p(shifted)
    return {
        "method": cells[0]["method"],
        "runs": len(cells),
        "mean": mean(set_means(shifted, "top1").values()),
        "sd": seed_spread(shifted),
        "gain": mean(shifted_gains),
        "gain_sd_over_sets": spread(list(shifted_gains)),
        "gain_report": mean(set_means(report, "gain").values()) if report else None,
        "worst": gains[worst],
        "worst_set": worst,
        "p": p,
        "paired": unit,
        "ece": mean(set_means(shifted, "ece").values()),
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
    return by_key([cell for cell in cells if "top1" in cell], "setting")


def with_fewer_images(cells: Sequence[Cell]) -> set[str]:
    """Methods of one setting that saw fewer images than another did in the same run."""
    most: dict[tuple[str, int], int] = defaultdict(int)
    for cell in cells:
        run = cell["set"], cell["seed"]
        most[run] = max(most[run], cell["images"])
    return {c["method"] for c in cells if c["images"] < most[c["set"], c["seed"]]}


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    rule = "|" + "---|" * len(head)
    return [_line(head), rule, *(_line(row) for row in rows)]


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def markdown(cells: Sequence[Cell], skipped: Mapping[str, str]) -> str:
    """The table of one setting; zero-shot first, then by mean gain."""
    rows = [summarise(group) for group in by_key(cells, "method").values()]
    rows.sort(key=lambda row: (row["method"] != "zero_shot", -row["gain"]))
    sets = list(dict.fromkeys(cell["set"] for cell in cells))
    kinds = {cell["set"]: cell["kind"] for cell in cells}
    mark = {"dev": " (dev)", "clean": " (clean)", "report": ""}
    head = ["method", "accuracy", "gain", "gain, not dev", "worst set", "p", "ECE", "images/s"]
    head += [name + mark[kinds[name]] for name in sets]
    table: list[list[str]] = []
    most, fewer = max(row["runs"] for row in rows), with_fewer_images(cells)
    for row in rows:
        name = row["method"] if row["runs"] == most else f"{row['method']} (incomplete)"
        if row["method"] in fewer:
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
            three_digits(row["images_per_s"]),
        ]
        table.append([*values, *(_set_cell(row["sets"].get(name)) for name in sets)])
    units = ", ".join(sorted({row["paired"] for row in rows}))
    lines = [
        *grid(head, table),
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


def three_digits(value: float) -> str:
    """A positive value with three digits or all of its whole ones."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{digits}f}"
