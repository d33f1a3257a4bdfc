"""The HTML of a page: self-contained, accessible, escaped."""

import re
from pathlib import Path
from typing import Any

from cliquetta.report.page import Choices, build_page
from cliquetta.report.runs import load_runs
from tests._helpers.html_reader import Reader
from tests._helpers.made_runs import STREAM, make_run

LABELS, PLAIN, ADAPTED = STREAM


def test_a_page_fetches_nothing_describes_pictures_and_links_to_itself(
    page: Any,
) -> None:
    reader = Reader(page.html)
    assert not reader.all("script") and not reader.all("iframe")
    for attributes in (attributes for _, attributes in reader.tags):
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), value
    styles = re.findall(r"<style>(.*?)</style>", page.html, re.DOTALL)
    assert not any("@import" in style or "http" in style for style in styles)
    assert "default-src 'none'" in page.html
    figures = re.findall(
        r"<svg.*?</svg>", page.html, re.DOTALL
    )  # in the colours of the page
    assert all("var(--ink)" in figure and "#1c2127" not in figure for figure in figures)
    assert "prefers-color-scheme: dark" in page.html and "@media print" in page.html
    assert len(reader.all("img")) > 10
    assert all(attributes["alt"] for attributes in reader.all("img"))
    svgs = [attributes for attributes in reader.all("svg") if "role" in attributes]
    assert len(svgs) == len(reader.all("figure")) >= 4
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in svgs)
    ids = [attributes["id"] for _, attributes in reader.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    targets = [a.get("href") or a.get("xlink:href") for _, a in reader.tags]
    targets += [f"#{name}" for name in re.findall(r"url\(#([^)]+)\)", page.html)]
    inside = {target[1:] for target in targets if target and target.startswith("#")}
    assert inside and inside <= set(ids)


def test_names_and_titles_cannot_become_markup(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    make_run(folder, "zero_shot", LABELS, PLAIN)
    note = {"note": "<script>alert(1)</script>"}
    make_run(folder, "scap", LABELS, ADAPTED, config=note, evidence=True)
    runs, _ = load_runs([folder])
    html = build_page(runs, (), Choices(title="<img src=x>")).html
    assert not Reader(html).all("script")
    assert "<b>frog</b>" not in html and "&lt;b&gt;frog&lt;/b&gt; &amp; co" in html
    assert "<img src=x>" not in html
