"""Runs of a tiny model, made for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cliquetta.evaluation import sweep as sweeping
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.record import Run, find_runs
from cliquetta.evaluation.sweep import RunContext, sweep
from cliquetta.model.clip import CLIP
from tests._helpers.tiny import build_tiny_clip


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models loaded, in place of files on disk."""
    names: list[str] = []

    def create(name: str, **settings: Any) -> CLIP:
        names.append(name)
        if name == "broken":
            raise ValueError("no such model")
        return build_tiny_clip(seed=len(name))

    monkeypatch.setattr(sweeping, "create_model", create)
    return names


@pytest.fixture
def made(tmp_path: Path, loads: list[str]) -> Any:
    """Run specs; gives the runs back."""

    def make(*specs: RunSpec) -> list[Run]:
        results = sweep(specs, RunContext(tmp_path))
        assert not [result.error for result in results if result.error]
        return find_runs([tmp_path])[0]

    return make
