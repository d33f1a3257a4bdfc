"""Runs of a tiny model, made for a test, and a method that drifts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cliquetta.data.stream import Stream
from cliquetta.evaluation import sweep as sweeping
from cliquetta.evaluation.grid import RunSpec
from cliquetta.evaluation.record import Record, Run, find_runs
from cliquetta.evaluation.runner import evaluate
from cliquetta.evaluation.sweep import RunContext, sweep
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.streaming import Drift, DriftConfig, made_up_dataset
from tests._helpers.tiny import build_tiny_clip


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were loaded; they are made, not read from disk."""
    names: list[str] = []

    def create(name: str, **settings: Any) -> CLIP:
        names.append(name)
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


@pytest.fixture
def stream(tiny_clip: CLIP) -> Stream:
    return Stream(made_up_dataset(), tiny_clip.preprocess, batch_size=8, seed=3)


@pytest.fixture
def drift(tiny_clip: CLIP, tiny_prompts: ClassPrompts) -> Drift:
    return Drift(tiny_clip, tiny_prompts, DriftConfig())


@pytest.fixture
def run(drift: Drift, stream: Stream, tmp_path: Path) -> Callable[..., Record]:
    """Evaluate the method on the stream, by default into the test's folder."""
    return partial(evaluate, drift, stream, out=tmp_path)
