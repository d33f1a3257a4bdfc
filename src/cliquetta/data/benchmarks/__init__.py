"""The known datasets: facts in ``facts.json``, in the order of the paper's tables; layouts here."""

import json
from importlib.resources import files
from itertools import product
from typing import Any

from cliquetta.data.benchmarks.benchmark import Benchmark, DataNotFoundError
from cliquetta.data.benchmarks.layouts import LAYOUTS

__all__ = ["BENCHMARKS", "Benchmark", "DataNotFoundError"]


def _load() -> tuple[Benchmark, ...]:
    text = files("cliquetta.data.benchmarks").joinpath("facts.json").read_text(encoding="utf-8")
    benchmarks = []
    for id, facts in json.loads(text).items():
        lists: dict[str, Any] = {name: tuple(facts[name]) for name in ("folders", "traps")}
        if corruptions := facts.pop("corruptions", None):  # 5 severities each, of as many images
            pairs = product(corruptions, (5, 4, 3, 2, 1))
            lists["splits"] = {f"{name}/{n}": facts["splits"] for name, n in pairs}
        lists["layouts"] = tuple(layout for layout in LAYOUTS if layout.dataset == id)
        benchmarks.append(Benchmark(id, **facts | lists))
    return tuple(benchmarks)


BENCHMARKS = _load()
