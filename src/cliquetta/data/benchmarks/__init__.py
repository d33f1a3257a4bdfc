"""Datasets of the literature, in the order of the paper's tables (``facts.json``), with readers."""

import json
from importlib.resources import files
from itertools import product

from cliquetta.data.benchmarks.benchmark import Benchmark, DataNotFoundError
from cliquetta.data.benchmarks.layouts import read_layout

__all__ = ["BENCHMARKS", "Benchmark", "DataNotFoundError"]


def _load() -> tuple[Benchmark, ...]:
    """Read all benchmarks."""
    path = files("cliquetta.data.benchmarks") / "facts.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    benchmarks = []
    for id, facts in entries.items():
        for name in ("folders", "traps"):
            facts[name] = tuple(facts[name])

        # 5 severities of each corruption, each of as many images.
        if corruptions := facts.pop("corruptions", None):
            pairs = product(corruptions, (5, 4, 3, 2, 1))
            images = facts["splits"]
            facts["splits"] = {f"{name}/{severity}": images for name, severity in pairs}

        class_list = facts["class_list"]
        layouts = [read_layout(class_list, entry) for entry in facts["layouts"]]
        facts["layouts"] = tuple(layouts)
        benchmarks.append(Benchmark(id, **facts))
    return tuple(benchmarks)


BENCHMARKS = _load()
