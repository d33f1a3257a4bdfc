"""The demo's report in a headless browser: whole, silent, readable on any screen and on paper."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # lives in the browser's environment only; `make test` collects this file too
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `cliquetta demo` ends with; it prints the path."""
    out = tmp_path_factory.mktemp("demo")
    words = ["demo", "--images", "24", "--batch-size", "12", "--shifts", "fog:4", "--out", str(out)]
    program = "from cliquetta.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words, "--device", "cpu", "--threads", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = re.search(r"on one page: (\S+)", done.stdout)
    assert printed, done.stdout
    return Path(printed[1])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "no chromium: `make test-browser` installs it"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    """The page, opened; it may neither complain nor ask for anything beyond its own file."""
    complaints: list[str] = []
    asked: list[str] = []
    page = browser.new_page(viewport={"width": 1200, "height": 900}, reduced_motion="reduce")
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda note: complaints.append(note.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    yield page
    page.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]


def test_every_picture_is_there(page: Page) -> None:
    widths = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(widths) > 5 and min(widths) > 0
    boxes = page.evaluate(
        "[...document.querySelectorAll('figure > svg')].map(svg => svg.getBoundingClientRect())"
        ".map(box => [box.width, box.height])"
    )
    assert len(boxes) >= 4 and all(width > 100 and height > 80 for width, height in boxes)
    names = page.locator("figure > svg").evaluate_all("all => all.map(svg => svg.ariaLabel)")
    assert all(names)


def test_it_says_what_happened_and_how_to_repeat_it(page: Page) -> None:
    text = page.inner_text("main")
    for part in ("Results", "Accuracy over the stream", "Cliques", "Attention", "Features"):
        assert part in text
    assert "cliquetta evaluate --dataset bundled@fog:4 --method scap" in text
    for link in page.locator("nav a").all():
        link.click()
        target = str(link.get_attribute("href"))
        assert page.locator(target).evaluate("part => part.getBoundingClientRect().top") < 900
    page.locator("summary").last.click()
    assert "learning_rate" in page.inner_text("details[open]")


def test_no_figure_holds_text_outside_of_its_frame(page: Page) -> None:
    outside = page.evaluate(
        """[...document.querySelectorAll('figure > svg')].flatMap(svg => {
            const frame = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('text')].filter(text => {
                const box = text.getBoundingClientRect();
                return box.left < frame.left - 2 || box.right > frame.right + 2;
            }).map(text => text.textContent);
        })"""
    )
    assert outside == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_on_either_background(page: Page, scheme: str) -> None:
    """At least 4.5 : 1, the contrast that accessibility rules ask for."""
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    ratios = page.evaluate(
        """() => {
            const light = colour => {
                const parts = colour.match(/[0-9.]+/g).slice(0, 3).map(value => {
                    const share = value / 255;
                    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
            };
            const back = light(getComputedStyle(document.querySelector('section')).backgroundColor);
            const kinds = ['p', 'th', 'td', 'figcaption', '.note', 'a', 'pre', 'svg text'];
            return kinds.flatMap(kind => [...document.querySelectorAll('section ' + kind)])
                .map(element => {
                    const style = getComputedStyle(element);
                    const front = light(element.closest('svg') ? style.fill : style.color);
                    return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
                });
        }"""
    )
    assert len(ratios) > 40 and min(ratios) >= 4.5


def test_a_narrow_screen_scrolls_down_only(page: Page) -> None:
    page.set_viewport_size({"width": 375, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_it_prints(page: Page) -> None:
    page.emulate_media(media="print", color_scheme="dark")
    paper = page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
    assert page.pdf(format="A4")[:4] == b"%PDF"
