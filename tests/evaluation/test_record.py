"""Records that earlier versions wrote."""

from __future__ import annotations

import json
from pathlib import Path

from cliquetta.evaluation.record import (
    RECORD,
    Run,
    load_record,
    pack_records,
    parse_record,
    unpack_records,
)

OLD = """{
 "id": "bundled--tpt--0--0123456789",
 "settings": {
  "dataset": "bundled", "method": "tpt", "fitted": null, "seed": 0,
  "config": {"view_count": 32, "view_kind": "zoom-crop", "zoom": 1.2, "chunk": 256, "kept": 0.2,
             "lr": 0.005, "weight_decay": 0.01, "steps": 1, "rows": 512},
  "model": {"id": "micro", "fingerprint": "0123", "dtype": "float32"},
  "preprocessing": {"size": 32, "fingerprint": "4567"},
  "prompts": {"classes": 10, "names": "aa", "templates": ["a photo of a {}."], "fingerprint": "bb"},
  "stream": {"datasets": [{"id": "bundled", "images": 8, "files": "cc"}], "batch_size": 4,
             "order": "given", "seed": 0, "views": null, "view_seed": null, "dirichlet": null,
             "limit": null}
 },
 "status": "finished", "preset": null, "environment": {}, "metrics": {"top1": 75.0}, "images": 8,
 "skipped": [], "throughput": {"images_per_second": 2.0}, "peak_memory": {}, "notes": {},
 "started": "", "finished": "", "resumed": 0, "error": ""
}"""
"""As version 0.1.0 wrote it before the fields of configs had one spelling."""


def test_old_names_are_read_as_those_of_today(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(OLD)
    record = load_record(tmp_path)
    assert record.settings["config"] == {
        "views": 32,
        "view_kind": "zoom-crop",
        "view_zoom": 1.2,
        "chunk": 256,
        "selection_fraction": 0.2,
        "lr": 0.005,
        "weight_decay": 0.01,
        "steps": 1,
        "text_chunk": 512,
    }
    assert Run(record, None).order == "sequential"
    assert Run(record, None).conditions["order"] == "sequential"
    packed = tmp_path / "records.json"
    packed.write_text(pack_records([record]))
    assert unpack_records(packed) == [record]


def test_a_record_of_a_method_that_is_not_installed_is_read_as_it_is() -> None:
    values = json.loads(OLD)
    values["settings"]["method"] = "of_a_plug_in"
    assert parse_record(values).settings["config"] == json.loads(OLD)["settings"]["config"]
