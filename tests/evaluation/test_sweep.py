"""Grids: every cell once, none run twice, no failure that stops the rest."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cliquetta.errors import UnknownNameError
from cliquetta.evaluation import sweep as sweeping
from cliquetta.evaluation.record import PREDICTIONS, list_records, load_record
from cliquetta.evaluation.runner import Step
from cliquetta.evaluation.sweep import (
    RunContext,
    RunResult,
    RunSpec,
    SerialExecutor,
    grid,
    run_cell,
    sweep,
)
from cliquetta.model.clip import CLIP
from tests._helpers.tiny import build_tiny_clip

BASE = RunSpec("bundled", "zero_shot", model="tiny", limit=30, batch_size=10)


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


def test_a_grid_has_every_combination_and_zero_shot_first() -> None:
    cells = grid(BASE, datasets=["bundled", "bundled@fog:1"], methods=["tda"], seeds=[0, 1])
    assert [(c.dataset, c.method, c.seed) for c in cells] == [
        (dataset, method, seed)
        for dataset in ("bundled", "bundled@fog:1")
        for method in ("zero_shot", "tda")
        for seed in (0, 1)
    ]
    assert len(grid(BASE, datasets=["bundled"], methods=["tda"], baseline=False)) == 1
    assert len(grid(BASE, datasets=["bundled"], methods=["zero_shot"])) == 1


def test_options_belong_to_their_method_only() -> None:
    base = RunSpec("bundled", "zero_shot", options=(("temperature", 2.0),))
    cells = grid(base, datasets=["bundled"], methods=["zero_shot", "tda"])
    assert [cell.options for cell in cells] == [(("temperature", 2.0),), ()]


def test_unknown_methods_and_presets_are_refused_before_the_first_run() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'zero_shot'"):
        grid(BASE, datasets=["bundled"], methods=["zeroshot"])
    with pytest.raises(UnknownNameError, match="preset of zero_shot"):
        grid(BASE, datasets=["bundled"], methods=["zero_shot:papr"])


def test_a_grid_is_run_once(tmp_path: Path, loads: list[str]) -> None:
    cells = grid(BASE, datasets=["bundled", "bundled@fog:2"], methods=["zero_shot"], seeds=[0, 1])
    steps: list[tuple[RunSpec, Step]] = []
    executor = SerialExecutor(lambda spec, step: steps.append((spec, step)))
    first = sweep(cells, RunContext(tmp_path), executor)
    assert [result.spec for result in first] == cells
    assert len(steps) == 4 * 3
    assert len(list_records(tmp_path)) == 4
    assert loads == ["tiny"]
    second = sweep(cells, RunContext(tmp_path), executor)
    assert second == first
    assert len(steps) == 4 * 3


def test_equal_cells_run_once(tmp_path: Path, loads: list[str]) -> None:
    seen: list[RunResult] = []
    results = sweep([BASE, BASE], RunContext(tmp_path), on_result=seen.append)
    assert len(seen) == 1
    assert results[0] == results[1]


def test_a_failing_cell_does_not_stop_the_others(tmp_path: Path, loads: list[str]) -> None:
    cells = [
        RunSpec("bundled", "zero_shot", model="broken", limit=30),
        RunSpec("bundlde", "zero_shot", model="tiny", limit=30),
        BASE,
    ]
    broken, misspelt, fine = sweep(cells, RunContext(tmp_path))
    assert broken.error == "ValueError: no such model"
    assert "did you mean 'bundled'" in misspelt.error
    assert fine.record is not None
    assert fine.record.status == "finished"


def test_a_broken_off_grid_continues(tmp_path: Path, loads: list[str]) -> None:
    cells = grid(BASE, datasets=["bundled"], methods=["tda"], seeds=[0, 1])
    whole = sweep(cells, RunContext(tmp_path / "whole"))

    def die(spec: RunSpec, step: Step) -> None:
        if spec == cells[2] and step.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(cells, RunContext(tmp_path / "broken"), SerialExecutor(die))
    assert len(list_records(tmp_path / "broken")) == 3
    resumed = sweep(cells, RunContext(tmp_path / "broken"))
    for left, right in zip(whole, resumed, strict=True):
        assert left.record is not None
        assert right.record is not None
        assert left.record.id == right.record.id
        assert left.record.metrics == right.record.metrics
        name = f"{left.record.id}/{PREDICTIONS}"
        a, b = (tmp_path / "whole" / name, tmp_path / "broken" / name)
        assert a.read_bytes() == b.read_bytes()


class Backwards:
    """Another executor: sends cells over the wire, last one first, and loses one."""

    def run(self, context: RunContext, specs: Sequence[RunSpec]) -> Iterator[RunResult]:
        for spec in list(reversed(specs))[:-1]:
            there = pickle.loads(pickle.dumps((context, spec)))
            yield run_cell(*there)


def test_another_executor_gives_the_same_records(tmp_path: Path, loads: list[str]) -> None:
    cells = [RunSpec("bundled", "zero_shot", model="tiny", limit=20, seed=s) for s in range(3)]
    here = sweep(cells, RunContext(tmp_path / "a"))
    there = sweep(cells, RunContext(tmp_path / "b"), Backwards())
    assert there[0].error == "the executor returned nothing for this run"
    for left, right in zip(here[1:], there[1:], strict=True):
        assert left.record is not None
        assert right.record is not None
        assert left.record.metrics == right.record.metrics
        assert left.record.settings == right.record.settings


def test_a_spec_becomes_the_stream_and_method_it_describes(loads: list[str]) -> None:
    place = RunContext(None)
    spec = RunSpec(
        "bundled>bundled@fog:1>bundled",
        "zero_shot",
        model="tiny",
        seed=7,
        options=(("temperature", "2"),),
        templates=("{}", "a {}"),
        limit=5,
        batch_size=4,
    )
    adapter, stream = place.prepare(spec)
    assert stream.id == spec.dataset
    assert (stream.images, stream.batch_size, stream.seed, stream.view_seed) == (15, 4, 7, 7)
    assert adapter.config.temperature == 2.0
    assert adapter.prompts.templates == ("{}", "a {}")
    assert adapter.seed == 7
    mixed = RunSpec("bundled+bundled@fog:1", "zero_shot", model="tiny", order="mixed", limit=5)
    assert place.prepare(mixed)[1].id == "bundled+bundled@fog:1"
    assert place.run(mixed).images == 10
    assert len(loads) == 1


def test_methods_with_views_get_them(tmp_path: Path, loads: list[str]) -> None:
    spec = RunSpec("bundled", "mta", model="tiny", limit=4)
    adapter, stream = RunContext(tmp_path).prepare(spec)
    assert stream.views == adapter.views is not None
    record = RunContext(tmp_path).run(spec)
    assert record.settings["stream"]["views"]["count"] == adapter.views.count
    assert load_record(tmp_path / record.id) == record


def test_another_model_takes_the_place_of_the_last(loads: list[str]) -> None:
    place = RunContext(None)
    first = place.prepare(BASE)[0].model
    assert place.prepare(BASE)[0].model is first
    other = place.prepare(RunSpec("bundled", "zero_shot", model="other", limit=3))[0].model
    assert loads == ["tiny", "other"]
    assert not torch.equal(first.visual.projection, other.visual.projection)  # type: ignore[arg-type]
