"""Figures follow the colours of the page, and are written as files."""

import json
import re
from pathlib import Path
from typing import Any

from tests._helpers.running import Run


def test_colours_follow_the_page(page: Any) -> None:
    figures = re.findall(r"<svg.*?</svg>", page.html, re.DOTALL)
    assert all("var(--ink)" in figure and "#1c2127" not in figure for figure in figures)
    assert "prefers-color-scheme: dark" in page.html and "@media print" in page.html


def test_command_writes_page_and_figures(run: Run, evaluated: Any, tmp_path: Path) -> None:
    out, figures = tmp_path / "deep" / "page.html", tmp_path / "figures"
    words = ("--out", out, "--figures", figures, "--attention", "rollout", "--title", "My run")
    document = json.loads(run("report", evaluated, *words, "--json").stdout)
    assert document["bytes"] == out.stat().st_size < 3_000_000
    assert len(document["runs"]) == 2 and len(document["figures"]) >= 8
    assert "<title>My run</title>" in out.read_text() and "attention rollout" in out.read_text()
    starts = {path.suffix: path.read_bytes()[:4] for path in figures.iterdir()}
    assert starts == {".png": b"\x89PNG", ".pdf": b"%PDF"}
