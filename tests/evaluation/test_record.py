"""Records: read back, alike by their settings, and listed once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cliquetta.data.stream import Stream
from cliquetta.evaluation.comparison import compare
from cliquetta.evaluation.predictions import PREDICTIONS, load_predictions
from cliquetta.evaluation.record import (
    RECORD,
    find_runs,
    load_record,
    pack_records,
    plan,
    unpack_records,
)
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.made_runs import BASE, make_records
from tests._helpers.streaming import Drift, DriftConfig, made_up_dataset


def test_runs_are_listed_once_and_unfinished_ones_apart(
    made: Any, tmp_path: Path
) -> None:
    (run,) = made(BASE)
    for path in (tmp_path, run.folder, run.folder / RECORD):
        assert [r.record.id for r in find_runs([path, run.folder])[0]] == [
            run.record.id
        ]
    text = (run.folder / RECORD).read_text().replace('"finished"', '"running"', 1)
    (run.folder / RECORD).write_text(text)
    assert load_record(run.folder).status == "running"
    finished, unfinished = find_runs([tmp_path])
    assert finished == [] and len(unfinished) == 1


def test_records_without_a_hash_are_read(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / run().id
    values = json.loads((folder / "record.json").read_text())
    del values["predictions"]
    (folder / "record.json").write_text(json.dumps(values))
    (folder / PREDICTIONS).write_bytes((folder / PREDICTIONS).read_bytes()[:-30])
    assert len(load_predictions(folder)) == 49
    assert find_runs([tmp_path])[0][0].record.predictions == {}


def test_the_id_depends_on_every_setting(
    tiny_clip: CLIP, tiny_prompts: ClassPrompts
) -> None:
    def identity(
        config: DriftConfig | None = None, seed: int = 0, **stream: Any
    ) -> str:
        adapter = Drift(tiny_clip, tiny_prompts, config or DriftConfig(), seed=seed)
        return plan(
            adapter, Stream(made_up_dataset(), tiny_clip.preprocess, **stream)
        ).id

    assert identity() == identity(workers=2) == identity(gamma=0.5)
    other = [identity(DriftConfig(rate=0.2)), identity(seed=1), identity(batch_size=3)]
    other += [identity(order="sequential"), identity(limit=10), identity()]
    assert len(set(other)) == 6 and identity().startswith("made-up--Drift--0--")


def test_packed_records_are_small_and_say_the_same(tmp_path: Path) -> None:
    records = make_records(tmp_path)
    path = tmp_path / "packed.json"
    path.write_text(pack_records(records), encoding="utf-8")
    assert unpack_records(path) == [
        replace(r, metrics={k: v for k, v in r.metrics.items() if k != "per_class"})
        for r in records
    ]
    runs = [run for run in find_runs([tmp_path])[0] if run.folder is not None]
    single, packed = compare(runs), compare(find_runs([path])[0])
    for key, cell in single.cells.items():
        assert (packed.cells[key].mean, packed.cells[key].gain) == (
            cell.mean,
            cell.gain,
        )
        assert packed.cells[key].test is None
    assert single.overall("tda").worst == (pytest.approx(-5.0), "toy@contrast:3")  # type: ignore[comparison-overlap]
    assert single.overall("tda").cost == pytest.approx(2.0)
