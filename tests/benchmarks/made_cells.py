"""Cells as ``accuracy.py`` writes them, with numbers whose means can be taken by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTING = "micro, fp32, stream iid, batch 64"


def make_cell(
    method: str, set: str, seed: int, top1: float, gain: float, **changes: Any
) -> dict[str, Any]:
    kind = "clean" if set == "clean" else "dev" if set == "noise:3" else "report"
    cell: dict[str, Any] = {
        "key": f"{method} {set} {seed}",
        "set": set,
        "kind": kind,
        "setting": SETTING,
        "method": method,
        "seed": seed,
        "made": "2026-01-02, a machine: `python benchmarks/accuracy.py --sets noise,fog,clean`.",
        "images": 100,
        "images_per_s": 50.0,
        "top1": top1,
        "gain": gain,
        "ece": 10.0,
        "segment_gains": [gain],
        "config": {},
    }
    return cell | changes


def make_cells() -> list[dict[str, Any]]:
    """Two shifts and clean pictures, two seeds.

    ``tent`` has all six runs; ``tda`` lacks a seed of fog; ``zero``, which cannot depend on the
    seed, has one seed of every set, on fewer images.
    """
    plain = {"noise:3": 40.0, "fog:3": 60.0, "clean": 90.0}
    cells = [make_cell("zero_shot", name, s, plain[name], 0.0) for name in plain for s in (0, 1)]
    for seed, gains in enumerate([(10.0, 2.0, -1.0), (12.0, -4.0, -2.0)]):
        for (name, top1), gain in zip(plain.items(), gains, strict=True):
            cells.append(make_cell("tent", name, seed, top1 + gain, gain, ece=20.0 + seed))
    cells += [make_cell("tda", "noise:3", seed, 41.0 + seed, 1.0 + seed) for seed in (0, 1)]
    cells += [make_cell("tda", "fog:3", 0, 63.0, 3.0)]
    for name, gain in (("noise:3", 4.0), ("fog:3", 1.0), ("clean", 0.0)):
        top1 = plain[name] + gain
        views = {"view_count": 16}
        cells.append(make_cell("zero", name, 0, top1, gain, images=50, config=views))
    return cells


def write_folder(
    folder: Path, cells: Sequence[dict[str, Any]], not_run: dict[str, str] | None = None
) -> Path:
    folder.mkdir(parents=True)
    (folder / "cells.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    (folder / "results.json").write_text(json.dumps({"settings": {}, "not_run": not_run or {}}))
    return folder
