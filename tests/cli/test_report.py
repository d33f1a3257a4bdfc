"""``cliquetta report``: one page about recorded runs."""

import json
from pathlib import Path

from tests._helpers.running import Run


def test_a_page_of_runs_and_what_is_left_out(run: Run, tiny_file: Path, tmp_path: Path) -> None:
    runs, page = tmp_path / "runs", tmp_path / "report.html"
    words = ("--dataset", "bundled", "--method", "zero_shot", "--limit", "8", "--out", runs)
    assert run("evaluate", *words, "--model", tiny_file).code == 0
    (tmp_path / "runs" / "begun").mkdir()
    document = json.loads(run("report", runs, "--out", page, "--json").stdout)
    assert document["page"] == str(page) and document["bytes"] == page.stat().st_size
    assert len(document["runs"]) == 1 and document["figures"] == []
    result = run("report", runs, "--out", page, "--figures", tmp_path / "figures")
    assert "1 run on one page" in result.text
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".pdf"}
    for option, sentence in (("--attention", "kind of attention"), ("--map", "unknown map")):
        assert run("report", runs, option, "nothing").refuses(sentence)
