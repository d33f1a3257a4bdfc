"""The known datasets, all in ``facts.json``, in the order of the paper's tables; their readers."""

import json
from importlib.resources import files
from itertools import product
from typing import Any

from cliquetta.data.benchmarks.benchmark import Benchmark, DataNotFoundError
from cliquetta.data.benchmarks.layouts import read_layout

__all__ = ["BENCHMARKS", "Benchmark", "DataNotFoundError"]


def _load() -> tuple[Benchmark, ...]:
    text = (
        files("cliquetta.data.benchmarks")
        .joinpath("facts.json")
        .read_text(encoding="utf-8")
    )
    benchmarks = []
    for id, facts in json.loads(text).items():
        lists: dict[str, Any] = {
            name: tuple(facts[name]) for name in ("folders", "traps")
        }
        if corruptions := facts.pop(
            "corruptions", None
        ):  # 5 severities each, of as many images
            pairs = product(corruptions, (5, 4, 3, 2, 1))
            lists["splits"] = {f"{name}/{n}": facts["splits"] for name, n in pairs}
        lists["layouts"] = tuple(
            read_layout(facts["class_list"], e) for e in facts["layouts"]
        )
        benchmarks.append(Benchmark(id, **facts | lists))
    return tuple(benchmarks)


BENCHMARKS = _load()
