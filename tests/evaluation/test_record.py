"""Records: whole, alike by their settings, and found once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cliquetta.evaluation.comparison import (
    IncomparableError,
    compare,
)
from cliquetta.evaluation.record import RECORD, Run, find_runs, load_record
from tests._helpers.made_runs import BASE


@pytest.mark.parametrize(
    ("section", "aspect"), [("preprocessing", "preprocessing"), ("prompts", "class names")]
)
def test_hashes_of_records_decide(made: Any, section: str, aspect: str) -> None:
    first, other = made(BASE, replace(BASE, method="tda"))
    key = "fingerprint" if section == "preprocessing" else "names"
    changed = {**other.record.settings[section], key: "another"}
    settings = {**other.record.settings, section: changed}
    other = Run(type(other.record)(other.record.id, settings, "finished"), other.folder)
    with pytest.raises(IncomparableError, match=aspect):
        compare([first, other])


def test_runs_are_found_once_and_unfinished_ones_apart(made: Any, tmp_path: Path) -> None:
    (run,) = made(BASE)
    for path in (tmp_path, run.folder, run.folder / RECORD):
        assert [r.record.id for r in find_runs([path, run.folder])[0]] == [run.record.id]
    text = (run.folder / RECORD).read_text().replace('"finished"', '"running"', 1)
    (run.folder / RECORD).write_text(text)
    assert load_record(run.folder).status == "running"
    finished, unfinished = find_runs([tmp_path])
    assert finished == [] and len(unfinished) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no runs in"):
        find_runs([tmp_path / "empty"])
    with pytest.raises(ValueError, match="no such folder"):
        find_runs([tmp_path / "nowhere"])
