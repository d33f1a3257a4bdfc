"""Presets from data files: constants that a method's authors chose per dataset.

``data/<method>.json`` holds, per preset, the fields that differ from the defaults and where they
were published. They are never defaults: a run that uses one says so by name.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, TypeVar

Config = TypeVar("Config")


def read_presets(method: str, config: type[Config]) -> dict[str, Config]:
    """Configs of ``data/<method>.json``, by preset name."""
    text = files("cliquetta.methods").joinpath(f"data/{method}.json").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = json.loads(text)["presets"]
    return {name: config(**entry["options"]) for name, entry in entries.items()}
