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


@pytest.fixture
def good() -> list[RunSpec]:
    return [with_method(BASE, "tda"), with_method(BASE, "tent")]


def test_every_method_and_dataset_is_built_before_the_first_run(
    good: list[RunSpec], tmp_path: Path
) -> None:
    context = RunContext(tmp_path)
    context.check(grid(good, datasets=["bundled", "bundled@fog:1"], seeds=[0, 1]))
    few_shot = with_method(BASE, "coop")  # has not been fitted
    with pytest.raises(UserError, match="labelled"):
        context.check(grid([*good, few_shot], datasets=["bundled"]))
    with pytest.raises(UnknownNameError):
        context.check(grid(good, datasets=["bundled", "bundlde"]))


def test_a_fitted_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        MethodSpec.from_fitted(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    "changes",
    [{}, {"order": "correlated"}, {"order": "long", "length": 50}, {"order": "uneven"}],
    ids=["shuffled", "correlated", "long", "uneven"],
)
def test_held_pixels_change_no_prediction(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    base = replace(BASE, dataset="bundled@fog:1", limit=20, **changes)
    cells = [with_method(base, name) for name in ("zero_shot", "tda", "mta/views=3")]
    cells += [replace(cells[0], dataset="bundled>bundled@fog:1")]

    # once from disk, once from memory
    read = sweep(cells, RunContext(tmp_path / "read", hold=False))
    held = sweep(cells, RunContext(tmp_path / "held", hold=True))
    for left, right in zip(read, held, strict=True):
        assert left.record.id == right.record.id
        assert left.record.environment["pixels"] == "read"
        assert right.record.environment["pixels"] == "held"

        expected = load_predictions(tmp_path / "read" / left.record.id)
        actual = load_predictions(tmp_path / "held" / right.record.id)
        assert actual.keys == expected.keys
        assert np.array_equal(actual.labels, expected.labels)
        assert np.allclose(actual.probabilities, expected.probabilities, atol=FEATURE)


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


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that methods called "fixed" and "drawn" predict."""
    result: list[int] = []
    fixed = replace(DRAWN, name="fixed", adapter=Fixed)
    monkeypatch.setattr(Drawn, "sizes", result)
    monkeypatch.setitem(registry._ENTRIES, "drawn", DRAWN)
    monkeypatch.setitem(registry._ENTRIES, "fixed", fixed)
    return result


def two_seeds(method: str) -> list[Any]:
    """Records of two runs of all 2,000 images."""
    base = replace(BASE, method=method, limit=None, view_seed=0)
    cells = [replace(base, seed=0), replace(base, seed=1)]
    results = sweep(cells, RunContext(None))
    return [result.record for result in results]


def test_an_independent_method_predicts_once_for_all_seeds(sizes: list[int]) -> None:
    first, second = two_seeds("fixed")
    assert sum(sizes) == 2000 + 10  # the first batch is always computed
    assert first.metrics["top1"] == pytest.approx(second.metrics["top1"])
    assert second.throughput["recalled"] == 1990
    rate = first.throughput["images_per_second"]
    assert second.throughput["images_per_second"] == rate


def test_predictions_that_depend_on_the_seed_are_not_recalled(sizes: list[int]) -> None:
    _, second = two_seeds("drawn")
    assert sum(sizes) == 4000
    assert "recalled" not in second.throughput


def test_a_grid_is_run_once(tmp_path: Path, loads: list[str]) -> None:
    cells = grid([BASE], datasets=["bundled", "bundled@fog:2"], seeds=[0, 1])
    steps: list[Any] = []
    ended: list[RunResult] = []
    for times in (1, 2):
        results = sweep(
            [*cells, cells[0]],
            RunContext(tmp_path),
            on_step=lambda *step: steps.append(step),
            on_result=ended.append,
        )
        assert [result.spec for result in results] == [*cells, cells[0]]
        assert results[-1] == results[0]
        # the second time nothing is run
        assert len(ended) == 4 * times
        assert len(steps) == 4 * 3
        assert len(list_records(tmp_path)) == 4
    assert ended[:4] == ended[4:]
    assert loads == ["tiny", "tiny"]


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
        for spec in reversed(specs[1:]):
            sent = pickle.dumps((context, spec))
            there, cell = pickle.loads(sent)
            yield RunResult(cell, there.run(cell))


def test_another_executor_gives_the_same_records(tmp_path: Path) -> None:
    cells = [replace(BASE, seed=seed) for seed in range(3)]
    _, *here = sweep(cells, RunContext(tmp_path / "a"))
    lost, *there = sweep(cells, RunContext(tmp_path / "b"), Backwards())
    assert lost.error == "the executor returned nothing for this run"

    # the other two are as they are here
    for left, right in zip(here, there, strict=True):
        assert left.record.metrics == right.record.metrics
        assert left.record.settings == right.record.settings


def test_a_spec_becomes_the_stream_and_method_it_describes() -> None:
    spec = replace(
        BASE,
        dataset="bundled>bundled@fog:1>bundled",
        limit=5,
        batch_size=4,
        seed=7,
        options=(("temperature", "2"),),
        templates=("{}", "a {}"),
    )
    adapter, stream = RunContext(None).prepare(spec)
    assert stream.id == spec.dataset
    assert stream.images == 15
    assert stream.batch_size == 4
    assert stream.seed == 7
    assert stream.view_seed == 7
    assert adapter.seed == 7
    assert adapter.config.temperature == 2.0
    assert adapter.prompts.templates == ("{}", "a {}")


def test_a_spec_may_mix_datasets(loads: list[str]) -> None:
    mixed = replace(BASE, dataset="bundled+bundled@fog:1", order="mixed", limit=5)
    context = RunContext(None)
    _, stream = context.prepare(mixed)
    assert stream.id == "bundled+bundled@fog:1"
    assert context.run(mixed).images == 10
    assert loads == ["tiny"]


def test_a_context_holds_one_model(loads: list[str]) -> None:
    context = RunContext(None)
    first, _ = context.prepare(BASE)
    context.prepare(replace(BASE, seed=1))
    assert loads == ["tiny"]
    other, _ = context.prepare(replace(BASE, model="other"))
    assert loads == ["tiny", "other"]  # the first one is dropped
    before: Any = first.model.visual
    after: Any = other.model.visual
    assert not torch.equal(before.projection, after.projection)
