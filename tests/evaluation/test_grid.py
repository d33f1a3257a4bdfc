"""Specs of runs: from options and grid files, checked before the first run."""

import json
from pathlib import Path

import pytest

from cliquetta.errors import UnknownNameError, UserError
from cliquetta.evaluation.grid import RunSpec, grid, read_grid, shard_of, with_method
from cliquetta.methods.building import registry
from tests._helpers.made_runs import BASE


def test_a_grid_has_zero_shot_first_and_once() -> None:
    tda = [with_method(BASE, "tda")]
    assert [cell.method for cell in grid(tda, datasets=["bundled"])] == [
        "zero_shot",
        "tda",
    ]
    assert len(grid(tda, datasets=["bundled"], baseline=False)) == 1
    assert len(grid([BASE], datasets=["bundled"])) == 1


def test_a_method_is_written_with_its_preset_and_fields() -> None:
    cell = with_method(BASE, "scap:paper/topk=2/retention=false")
    assert (cell.method, cell.preset) == ("scap", "paper")
    assert cell.options == (("topk", 2), ("retention", False))
    assert cell.label == "scap:paper/topk=2/retention=False"
    assert grid([cell], datasets=["bundled"])[0].options == ()


def test_a_grid_file_lays_shifts_over_datasets(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    block = {"datasets": ["bundled"], "shifts": ["fog", "frost"], "severities": [3, 5]}
    block |= {
        "methods": ["tda", "scap/topk=2"],
        "seeds": [0, 1],
        "limit": 9,
        "templates": ["a {}"],
    }
    plain = {"datasets": ["tar:{root}/x"], "methods": ["tda"], "baseline": False}
    plain["model"] = "ViT-B/16"
    path.write_text(json.dumps([block, plain]))
    specs = read_grid(path, root="/data", batch_size=5)
    assert len(specs) == 4 * 3 * 2 + 1
    assert specs[0] == RunSpec(
        "bundled@fog:3", "zero_shot", batch_size=5, limit=9, templates=("a {}",)
    )
    assert (specs[-1].dataset, specs[-1].limit) == ("tar:/data/x", None)
    with pytest.raises(UserError, match="--root"):
        read_grid(path)
    path.write_text(json.dumps([block | {"batchsize": 3}]))
    with pytest.raises(UnknownNameError):
        read_grid(path)


def test_a_star_stands_for_all_other_methods_and_slow_ones_have_limits(
    tmp_path: Path,
) -> None:
    path = tmp_path / "grid.json"
    block = {
        "datasets": ["bundled"],
        "methods": ["*", "mta/views=16"],
        "limits": {"mta": 5},
    }
    path.write_text(
        json.dumps([block | {"order": o, "limit": 50} for o in ("shuffled", "long")])
    )
    specs = read_grid(path)
    assert {s.method for s in specs} == {
        e.name for e in registry.method_entries() if e.fit is None
    }
    assert {s.limit for s in specs if s.method == "mta"} == {5}
    assert {s.options for s in specs if s.method == "mta"} == {(("views", 16),)}
    assert {s.limit for s in specs if s.method == "zero_shot"} == {5, 50}
    assert {s.limit for s in specs if s.method not in ("mta", "zero_shot")} == {50}
    shards = [shard_of(specs, number, 3) for number in (1, 2, 3)]
    assert [{s.order for s in shard} for shard in shards] == [
        {"shuffled"},
        {"long"},
        set(),
    ]
    assert sum(map(len, shards)) == len(specs)


def test_conditions_of_a_run_that_are_not_given() -> None:
    """As the command line documents them; records name only what differs."""
    spec = RunSpec(dataset="bundled", method="tda", seed=0)
    assert spec.batch_size == 64
    assert spec.order == "shuffled"
    assert spec.gamma == 0.1
    assert spec.present == (3, 3)
    assert spec.imbalance == 10.0
    assert spec.length == 10_000
    assert spec.limit is None
