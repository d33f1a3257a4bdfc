"""Recorded cells of one setting, and what the registry says about the methods in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cliquetta.methods.base import BatchDependence
from cliquetta.methods.registry import MethodEntry, get_method
from comparison.tables import Cell, by_key, summarise, with_fewer_images

BASELINE = "zero_shot"
BLANK = "–"
GROUPS = ("default", "all15", "all17")
"""Words of ``accuracy.py --sets`` that stand for several sets."""
NEEDS = {
    "text": "text tower",
    "text-prompts": "text prompts",
    "visual-prefix": "visual prefix",
    "visual-tokens": "visual tokens",
    "attention": "attention maps",
    "norm": "LayerNorms",
}
"""What methods ask of a model (``CLIP.capabilities``), in words."""


@dataclass(frozen=True)
class Setting:
    """The cells of one setting, and what its run could not do."""

    title: str
    cells: Sequence[Cell]
    not_run: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """A summary per label: zero-shot, then complete ones, then others, each by gain."""
        rows = [summarise(group) for group in by_key(self.cells, "method").values()]
        return sorted(
            rows, key=lambda r: (r["method"] != BASELINE, not self.complete(r), -r["gain"])
        )

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Sets and their kinds, clean ones last."""
        found = {str(c["set"]): str(c["kind"]) for c in self.cells}
        return dict(sorted(found.items(), key=lambda item: item[1] == "clean"))

    @cached_property
    def runs(self) -> int:
        """Pairs of a set and a seed that were run at all."""
        return len({(c["set"], c["seed"]) for c in self.cells})

    @cached_property
    def missing_sets(self) -> list[str]:
        """Sets that the recorded commands name and no method has."""
        commands = " ".join(dict.fromkeys(str(c["made"]) for c in self.cells))
        lists = re.findall(r"--(?:sets|shifts) (\S+)", commands)
        named = dict.fromkeys(word for text in lists for word in text.split(","))
        known = {name.partition(":")[0] for name in self.kinds} | {*self.kinds, *GROUPS}
        return [name for name in named if name not in known]

    @cached_property
    def fewer(self) -> set[str]:
        """Methods with fewer images."""
        return with_fewer_images(self.cells)

    def complete(self, row: Mapping[str, Any]) -> bool:
        """Whether a method has every set and seed; one seed does where no seed can matter."""
        if (
            get_method(method_of(row["method"])).adapter.batch_dependence
            is BatchDependence.INDEPENDENT
        ):
            return len(row["sets"]) == len(self.kinds)
        return bool(row["runs"] == self.runs)

    def of(self, name: str) -> list[dict[str, Any]]:
        """The rows of a registered method, with whatever preset or options."""
        return [row for row in self.rows if method_of(row["method"]) == name]

    def config(self, label: str) -> Mapping[str, Any]:
        """With which config a label was run."""
        return next(c["config"] for c in self.cells if c["method"] == label)


def method_of(label: str) -> str:
    """The registered name in ``NAME[:PRESET][/FIELD=VALUE]...``."""
    return label.partition("/")[0].partition(":")[0]


def kind_of(entry: MethodEntry) -> str:
    """How a method treats a batch, or that it is fitted first."""
    return "few shots" if entry.fit is not None else entry.adapter.batch_dependence.value


def needs_of(entry: MethodEntry, config: Mapping[str, Any]) -> str:
    """What must be there for the method, in words."""
    words = ["labelled images"] if entry.fit is not None else []
    words += [word for need, word in NEEDS.items() if need in entry.adapter.needs]
    views = config.get("view_count", config.get("views", 1))
    words += [f"{views} views"] if isinstance(views, int) and views > 1 else []
    return ", ".join(words) or BLANK


def is_default(label: str) -> bool:
    """Whether a label stands for the method's own defaults, perhaps under a preset's name."""
    entry, (head, _, fields) = get_method(method_of(label)), label.partition("/")
    preset = head.partition(":")[2]
    return not fields and (not preset or entry.presets.get(preset) == entry.config())
