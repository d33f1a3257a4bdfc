"""Methods as written on a command line, made comparable: same views, same text."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cliquetta.methods.base import BatchDependence
from cliquetta.methods.registry import get_method, list_methods, method_config
from comparison.worlds import World

BASELINE = "zero_shot"


@dataclass(frozen=True)
class Contestant:
    """A method with its settings, as written on the command line."""

    label: str
    name: str
    config: Any
    limit: int | None
    """Images of each set, for a method too slow for all."""

    @property
    def independent(self) -> bool:
        """Whether neither order nor batch nor seed can change a prediction."""
        return get_method(self.name).adapter.batch_dependence is BatchDependence.INDEPENDENT


def parse_methods(words: Sequence[str], options: argparse.Namespace, world: World) -> Any:
    """Contestants, zero-shot first, and the reasons why others cannot run here."""
    labels = [BASELINE]
    for word in words:
        for label in [word] if "/" in word else word.split(","):
            labels += [entry.name for entry in list_methods()] if label == "all" else [label]
    limits = dict(pair.split("=") for pair in options.limits.split(",") if pair)
    contestants, skipped = [], {}
    for label in dict.fromkeys(labels):
        head, *fields = label.split("/")
        name, _, preset = head.partition(":")
        changes = dict(field.split("=", 1) for field in fields)
        config = method_config(name, preset or None, changes)
        config = share_views(config, options.views or world.views, options.view_kind)
        config, reason = fit_to_world(name, config, world)
        if reason:
            skipped[label] = reason
        else:
            limit = int(limits[name]) if name in limits else None
            contestants.append(Contestant(label, name, config, limit))
    return contestants, skipped


def share_views(config: Any, count: int, kind: str) -> Any:
    """The config with the comparison's views, if it looks at several."""
    field = next((f for f in ("view_count", "views") if hasattr(config, f)), None)
    if field is None or getattr(config, field) == 1:
        return config
    changes: dict[str, Any] = {field: count}
    if kind != "own":
        changes["view_kind"] = kind
    return dataclasses.replace(config, **changes)


def fit_to_world(name: str, config: Any, world: World) -> tuple[Any, str]:
    """The config with its text side off where text is fixed, or why the method cannot run."""
    entry = get_method(name)
    missing = sorted(entry.adapter.needs - world.model.capabilities)
    if missing:
        return config, f"needs {' and '.join(missing)}, which {world.model.id} does not have"
    if entry.fit is not None and world.examples is None:
        return config, "is fitted on labelled images, of which there are none here"
    if world.model.text is None:
        if getattr(config, "modalities", "image") == "text":
            return config, "learns text, which is fixed here"
        if hasattr(config, "modalities"):
            config = dataclasses.replace(config, modalities="image")
        if hasattr(config, "adapt_text"):
            config = dataclasses.replace(config, adapt_text=False)
    return config, ""
