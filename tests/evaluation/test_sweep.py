"""Grids: every cell once, none run twice, no failure that stops the rest."""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.evaluation import sweep as sweeping
from cliquetta.evaluation.grid import RunSpec, grid, with_method
from cliquetta.evaluation.predictions import load_predictions
from cliquetta.evaluation.record import list_records
from cliquetta.evaluation.sweep import RunContext, RunResult, sweep
from cliquetta.methods.building import registry
from cliquetta.methods.building.spec import MethodSpec
from cliquetta.methods.zero_shot import ZeroShot, ZeroShotConfig
from cliquetta.types import Batch, Prediction
from tests._helpers.made_runs import BASE
from tests._helpers.tolerance import FEATURE

pytestmark = pytest.mark.usefixtures("loads")


def test_every_method_and_dataset_is_built_before_the_first_run(tmp_path: Path) -> None:
    good = [with_method(BASE, name) for name in ("tda", "tent")]
    RunContext(tmp_path).check(
        grid(good, datasets=["bundled", "bundled@fog:1"], seeds=[0, 1])
    )
    few_shot = with_method(BASE, "coop")  # has not been fitted
    with pytest.raises(UserError, match="labelled"):
        RunContext(tmp_path).check(grid([*good, few_shot], datasets=["bundled"]))
    with pytest.raises(UnknownNameError):
        RunContext(tmp_path).check(grid(good, datasets=["bundled", "bundlde"]))
    with pytest.raises(UserError, match="nowhere"):
        MethodSpec.from_fitted(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    "changes",
    [{}, {"order": "correlated"}, {"order": "long", "length": 50}, {"order": "uneven"}],
)
def test_held_pixels_change_no_prediction(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    base = replace(BASE, dataset="bundled@fog:1", limit=20, **changes)
    cells = [with_method(base, name) for name in ("zero_shot", "tda", "mta/views=3")]
    cells += [replace(cells[0], dataset="bundled>bundled@fog:1")]
    read = sweep(cells, RunContext(tmp_path / "read", hold=False))
    held = sweep(cells, RunContext(tmp_path / "held", hold=True))
    for left, right in zip(read, held, strict=True):
        assert left.record.id == right.record.id
        assert [r.record.environment["pixels"] for r in (left, right)] == [
            "read",
            "held",
        ]
        a, b = (
            load_predictions(tmp_path / n / left.record.id) for n in ("read", "held")
        )
        assert a.keys == b.keys and np.array_equal(a.labels, b.labels)
        assert np.allclose(a.probabilities, b.probabilities, atol=FEATURE)


def test_datasets_of_several_runs_are_held_where_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pixels(*cells: RunSpec, **settings: Any) -> list[str]:
        results = sweep(cells, RunContext(None, **settings))
        return [r.error or r.record.environment["pixels"] for r in results]

    other = replace(BASE, seed=1)
    assert pixels(BASE) == ["read"]
    assert pixels(BASE, other) == ["held", "held"]
    assert pixels(BASE, other, hold=False) == ["read", "read"]
    monkeypatch.setattr(sweeping, "HOST_ROOM", 1000)
    assert pixels(BASE, other) == ["read", "read"]
    assert "leave out --hold" in pixels(BASE, hold=True)[0]


def test_an_independent_method_predicts_once_for_all_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(Drawn, "sizes", sizes)
    monkeypatch.setitem(registry._ENTRIES, "drawn", DRAWN)
    monkeypatch.setitem(
        registry._ENTRIES, "fixed", replace(DRAWN, name="fixed", adapter=Fixed)
    )
    fixed = replace(BASE, limit=None, view_seed=0)
    cells = [replace(fixed, method="fixed", seed=seed) for seed in (0, 1)]
    first, second = (r.record for r in sweep(cells, RunContext(None)))
    assert sum(sizes) == 2000 + 10  # the first batch is always computed
    assert first.metrics["top1"] == pytest.approx(second.metrics["top1"])
    assert second.throughput["recalled"] == 1990
    assert (
        second.throughput["images_per_second"] == first.throughput["images_per_second"]
    )
    sizes.clear()
    cells = [replace(fixed, method="drawn", seed=seed) for seed in (0, 1)]
    first, second = (r.record for r in sweep(cells, RunContext(None)))
    assert sum(sizes) == 4000  # predictions depend on the seed: nothing is recalled
    assert "recalled" not in second.throughput


def test_a_grid_is_run_once(tmp_path: Path, loads: list[str]) -> None:
    cells = grid([BASE], datasets=["bundled", "bundled@fog:2"], seeds=[0, 1])
    steps: list[Any] = []
    ended: list[RunResult] = []
    watch: dict[str, Any] = {
        "on_step": lambda *step: steps.append(step),
        "on_result": ended.append,
    }
    for times in (1, 2):
        results = sweep([*cells, cells[0]], RunContext(tmp_path), **watch)
        assert [result.spec for result in results] == [*cells, cells[0]]
        assert results[-1] == results[0] and len(ended) == 4 * times
        assert len(steps) == 4 * 3 and len(list_records(tmp_path)) == 4
    assert loads == ["tiny"] * 2 and ended[:4] == ended[4:]


class Fixed(ZeroShot):
    """Independent, and notes the sizes of its batches."""

    sizes: ClassVar[list[int]] = []

    def _predict(self, batch: Batch) -> Prediction:
        Drawn.sizes.append(len(batch))
        return super()._predict(batch)


class Drawn(Fixed):
    """Breaks the promise of its kind: its predictions depend on the seed."""

    def _predict(self, batch: Batch) -> Prediction:
        return Prediction(super()._predict(batch).logits + 5 * self.seed)


DRAWN = registry.MethodEntry("drawn", Drawn, ZeroShotConfig, "", "")


class Backwards:
    """Another executor: sends cells over the wire, last one first, and loses one."""

    def run(self, context: RunContext, specs: Sequence[RunSpec]) -> Iterator[RunResult]:
        for spec in list(reversed(specs))[:-1]:
            there, cell = pickle.loads(pickle.dumps((context, spec)))
            yield RunResult(cell, there.run(cell))


def test_another_executor_gives_the_same_records(tmp_path: Path) -> None:
    cells = [replace(BASE, seed=seed) for seed in range(3)]
    here = sweep(cells, RunContext(tmp_path / "a"))
    there = sweep(cells, RunContext(tmp_path / "b"), Backwards())
    assert there[0].error == "the executor returned nothing for this run"
    for left, right in zip(here[1:], there[1:], strict=True):
        assert left.record.metrics == right.record.metrics
        assert left.record.settings == right.record.settings


def test_a_spec_becomes_the_stream_and_method_it_describes(loads: list[str]) -> None:
    machine = RunContext(None)
    words: dict[str, Any] = {
        "options": (("temperature", "2"),),
        "templates": ("{}", "a {}"),
    }
    words |= {
        "dataset": "bundled>bundled@fog:1>bundled",
        "limit": 5,
        "batch_size": 4,
        "seed": 7,
    }
    spec = replace(BASE, **words)
    adapter, stream = machine.prepare(spec)
    assert stream.id == spec.dataset
    assert (stream.images, stream.batch_size, stream.seed, stream.view_seed) == (
        15,
        4,
        7,
        7,
    )
    assert adapter.config.temperature == 2.0 and adapter.seed == 7
    assert adapter.prompts.templates == ("{}", "a {}")
    mixed = replace(BASE, dataset="bundled+bundled@fog:1", order="mixed", limit=5)
    assert machine.prepare(mixed)[1].id == "bundled+bundled@fog:1"
    assert machine.run(mixed).images == 10 and loads == ["tiny"]
    first, other = adapter.model, machine.prepare(replace(BASE, model="other"))[0].model
    assert loads == ["tiny", "other"]  # the first one is dropped
    assert not torch.equal(first.visual.projection, other.visual.projection)  # type: ignore[arg-type]
