"""``python -m benchmarks.results`` with a tiny model on a few bundled images."""

import json
from pathlib import Path

import pytest

from benchmarks.results import grid_files
from benchmarks.results.pages import ResultsPages
from cliquetta.evaluation.record import load_record, unpack_records
from tests._helpers.running import Run


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("headlin",), "did you mean 'headline'"),
        (("ood",), "cliquetta evaluate --grid ood"),
        (("headline", "--again", "tent"), "--again needs --run"),
        (("headline", "--features", "kept"), "--grid and --features need --run"),
        (("methods", "--run", "--grid", "reel"), "did you mean 'real'"),
        (("headline", "--run", "--again", "tnt"), "did you mean 'tent'"),
        (("headline", "--shard", "3/2"), "--shard takes I/N"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    write: Run, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    assert write(*words, "--results", tmp_path / "results").refuses(sentence)
    assert not list(tmp_path.iterdir())


def test_a_page_is_not_rewritten_unasked(
    write: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    monkeypatch.setattr(ResultsPages, "texts", lambda *_: {page: "from the records"})
    words = ("headline", "--results", tmp_path)
    assert write(*words).code == 0
    assert page.read_text() == "from the records"

    page.write_text("mine")
    refused = write(*words)
    assert refused.code == 1
    assert "pass --overwrite" in refused.stderr
    assert page.read_text() == "mine"

    assert write(*words, "--overwrite").code == 0
    assert page.read_text() == "from the records"
    assert "what the records say" in write(*words).text


def test_runs_that_are_recorded_are_not_run_again(
    write: Run, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = {
        "datasets": ["bundled"],
        "methods": ["tda", "tent"],
        "model": str(tiny_file),
        "limit": 20,
        "batch_size": 10,
    }
    (tmp_path / "tiny.json").write_text(json.dumps([block]))
    monkeypatch.setattr(grid_files, "OWN_GRIDS", tmp_path)
    monkeypatch.setitem(grid_files.GRIDS, "methods", ("tiny",))
    monkeypatch.setattr(ResultsPages, "texts", lambda *_: {})
    results = tmp_path / "results"
    results.mkdir()

    def record(out: str, *words: str) -> list[str]:
        folders = ("--results", results, "--out", tmp_path / out)
        assert write("methods", "--run", *folders, *words).code == 0
        runs = [path.parent for path in tmp_path.glob(f"{out}/*/record.json")]
        return sorted(load_record(run).method for run in runs)

    assert record("first") == ["tda", "tent", "zero_shot"]
    before = (results / "tiny.json").read_text()
    assert record("second") == []
    assert (results / "tiny.json").read_text() == before
    assert record("third", "--again", "tent") == ["tent"]
    assert len(unpack_records(results / "tiny.json")) == 3


def test_a_grid_whose_images_need_a_folder_is_left_as_it_is(
    write: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultsPages, "texts", lambda *_: {})
    result = write("published", "--run", "--results", tmp_path, "--out", tmp_path)
    assert "its images need --root" in result.text
    assert not list(tmp_path.iterdir())
