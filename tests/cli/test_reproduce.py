"""``cliquetta reproduce`` with a tiny model on a few bundled images."""

import json
from pathlib import Path

import pytest

from cliquetta.cli.reproduce import PAGES
from cliquetta.evaluation.record import load_record, unpack_records
from cliquetta.report.results_pages import GRIDS, ResultsPages
from tests._helpers.running import Run


def test_a_page_is_not_rewritten_unasked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    monkeypatch.setattr(ResultsPages, "texts", lambda *_: {page: "from the records"})
    ask = ("reproduce", "headline", "--results", tmp_path)
    assert run(*ask).code == 0 and page.read_text() == "from the records"
    page.write_text("mine")
    result = run(*ask)
    assert (
        result.code == 1
        and "pass --overwrite" in result.stderr
        and page.read_text() == "mine"
    )
    assert run(*ask, "--overwrite").code == 0 and page.read_text() == "from the records"


def test_runs_that_are_recorded_are_not_run_again(
    run: Run, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRIDS, "methods", ("tiny",))
    monkeypatch.setattr(ResultsPages, "texts", lambda *_: {})
    block = {
        "datasets": ["bundled"],
        "methods": ["tda", "tent"],
        "model": str(tiny_file),
    }
    path, results = tmp_path / "tiny.json", tmp_path / "results"
    path.write_text(json.dumps([{**block, "limit": 20, "batch_size": 10}]))
    for module in ("evaluation.grid", "cli.reproduce"):
        monkeypatch.setattr(f"cliquetta.{module}.packaged_grid", lambda _: path)
    results.mkdir()

    def record(out: str, *words: str) -> list[str]:
        ask = (
            "reproduce",
            "methods",
            "--run",
            "--results",
            results,
            "--out",
            tmp_path / out,
        )
        assert run(*ask, *words).code == 0
        return sorted(
            load_record(file.parent).method
            for file in tmp_path.glob(f"{out}/*/record.json")
        )

    assert record("first") == ["tda", "tent", "zero_shot"]
    before = (results / "tiny.json").read_text()
    assert record("second") == [] and (results / "tiny.json").read_text() == before
    assert record("third", "--again", "tent") == ["tent"]
    assert len(unpack_records(results / "tiny.json")) == 3


def test_pages_are_known_before_they_can_be_written() -> None:
    assert tuple(GRIDS) == PAGES


@pytest.mark.parametrize("words", [("--grid", "leaderboard"), ("--features", "kept")])
def test_what_is_for_runs_needs_a_run(run: Run, words: tuple[str, str]) -> None:
    result = run("reproduce", "leaderboard", *words)
    assert result.refuses("--grid and --features need --run"), result.text
