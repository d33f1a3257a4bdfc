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
    record = run.folder / RECORD
    for path in (tmp_path, run.folder, record):
        (found,), _ = find_runs([path, run.folder])
        assert found.record.id == run.record.id

    text = record.read_text()
    record.write_text(text.replace('"finished"', '"running"', 1))
    assert load_record(run.folder).status == "running"
    finished, unfinished = find_runs([tmp_path])
    assert finished == []
    assert len(unfinished) == 1


def test_records_without_a_hash_are_read(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / run().id
    record = folder / RECORD
    values = json.loads(record.read_text())
    del values["predictions"]
    record.write_text(json.dumps(values))

    # of 50 predictions the last one is cut off
    predictions = folder / PREDICTIONS
    predictions.write_bytes(predictions.read_bytes()[:-30])
    assert len(load_predictions(folder)) == 49
    (found,), _ = find_runs([tmp_path])
    assert found.record.predictions == {}


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
    assert len(set(other)) == 6
    assert identity().startswith("made-up--Drift--0--")


def test_packed_records_are_small_and_say_the_same(tmp_path: Path) -> None:
    records = make_records(tmp_path)
    path = tmp_path / "packed.json"
    path.write_text(pack_records(records), encoding="utf-8")
    for unpacked, record in zip(unpack_records(path), records, strict=True):
        metrics = dict(record.metrics)
        metrics.pop("per_class", None)
        assert unpacked == replace(record, metrics=metrics)

    # a table of packed records lacks only what needs predictions
    found, _ = find_runs([tmp_path])
    single = compare([run for run in found if run.folder is not None])
    packed = compare(find_runs([path])[0])
    for key, cell in single.cells.items():
        assert packed.cells[key].mean == cell.mean
        assert packed.cells[key].gain == cell.gain
        assert packed.cells[key].test is None
    assert single.overall("tda").worst == (pytest.approx(-5.0), "toy@contrast:3")  # type: ignore[comparison-overlap]
    assert single.overall("tda").cost == pytest.approx(2.0)
