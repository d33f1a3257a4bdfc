"""``cliquetta report``: one page about recorded runs."""

from pathlib import Path

from tests._helpers.made_runs import STREAM, make_run
from tests._helpers.running import Run

LABELS, PLAIN, _ = STREAM


def test_what_cannot_be_reported_on_is_refused_and_unfinished_runs_are_left_out(
    run: Run, tmp_path: Path
) -> None:
    page = ("--out", tmp_path / "page.html")
    make_run(tmp_path / "half", "tent", LABELS, PLAIN, status="failed")
    (tmp_path / "empty").mkdir()
    for words, reason in (
        (("empty",), "no runs in"),
        (("none",), "no such folder"),
        (("half",), "no finished run"),
        (("half", "--attention", "rollup"), "did you mean 'rollout'"),
        (("half", "--map", "umap"), "unknown map 'umap'"),
    ):
        assert run("report", tmp_path / words[0], *words[1:], *page).refuses(reason)
    assert not (tmp_path / "page.html").exists()
    make_run(tmp_path / "half", "zero_shot", LABELS, PLAIN)
    text = run("report", tmp_path / "half", *page).text
    assert "1 run on one page" in text and "1 unfinished run left out" in text
