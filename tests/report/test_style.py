"""Figures are written as files."""

import json
from pathlib import Path
from typing import Any

from tests._helpers.running import Run


def test_command_writes_page_and_figures(
    run: Run, evaluated: Any, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "page.html"
    figures = tmp_path / "figures"
    words = (
        "--out",
        out,
        "--figures",
        figures,
        "--attention",
        "rollout",
        "--title",
        "My run",
    )
    document = json.loads(run("report", evaluated, *words, "--json").stdout)
    assert document["bytes"] == out.stat().st_size < 3_000_000
    assert len(document["runs"]) == 2 and len(document["figures"]) >= 8
    assert (
        "<title>My run</title>" in out.read_text()
        and "attention rollout" in out.read_text()
    )
    starts = {path.suffix: path.read_bytes()[:4] for path in figures.iterdir()}
    assert starts == {".png": b"\x89PNG", ".pdf": b"%PDF"}
