"""Records: read back, alike by their settings, and listed once."""

import json
from pathlib import Path
from typing import Any

from cliquetta.data.stream import Stream
from cliquetta.evaluation.predictions import PREDICTIONS, load_predictions
from cliquetta.evaluation.record import RECORD, find_runs, load_record, plan
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.made_runs import BASE
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
