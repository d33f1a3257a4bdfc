"""The report of the demo in a browser: complete, silent, readable on any screen and on paper."""

import io
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests._helpers.running import COMMAND
from tests.browser.conftest import OpenPage, Page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page at the end of `cliquetta demo`, which prints the path."""
    out = tmp_path_factory.mktemp("demo")
    words = [
        "demo",
        "--images",
        "24",
        "--batch-size",
        "12",
        "--shifts",
        "fog:4",
        "--out",
        str(out),
    ]
    words += [
        "--method",
        "scap,domain_norm",
        "--singles",
        "0",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    environment = {**os.environ, "COLUMNS": "400"}
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    printed = re.search(r"Report: (\S+)", done.stdout)
    assert printed, done.stdout
    return Path(printed[1])


@pytest.fixture
def page(open_page: OpenPage, report: Path) -> Iterator[Page]:
    """The page, opened; it may neither complain nor ask for anything beyond its own file."""
    look = {"viewport": {"width": 1200, "height": 900}, "reduced_motion": "reduce"}
    with open_page(report.as_uri(), **look) as page:
        yield page


def test_every_picture_is_there(page: Page) -> None:
    widths = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(widths) > 5 and min(widths) > 0
    boxes = page.evaluate(
        "[...document.querySelectorAll('figure > svg')].map(svg => svg.getBoundingClientRect())"
        ".map(box => [box.width, box.height])"
    )
    assert len(boxes) >= 4 and all(
        width > 100 and height > 80 for width, height in boxes
    )
    names = page.locator("figure > svg").evaluate_all(
        "all => all.map(svg => svg.ariaLabel)"
    )
    assert all(names)


def test_links_lead_to_sections_and_settings_fold_out(page: Page) -> None:
    assert "Inside scap" in page.inner_text("main")
    for link in page.locator("nav a").all():
        link.click()
        target = str(link.get_attribute("href"))
        assert (
            page.locator(target).evaluate("part => part.getBoundingClientRect().top")
            < 900
        )
    page.locator("summary").last.click()
    assert "lr" in page.inner_text("details[open]")


def test_a_narrow_screen_shows_every_column(page: Page) -> None:
    page.set_viewport_size({"width": 500, "height": 900})
    cut = "[...document.querySelectorAll('.scroll')].filter(x => x.scrollWidth > x.clientWidth + 1)"
    assert page.evaluate(f"{cut}.map(x => x.ariaLabel)") == []
    for width in (500, 375):  # and scrolls down only
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


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


def luminance(colour: Sequence[float]) -> float:
    """Relative luminance of red, green, blue in 0 to 255, by WCAG."""
    shares = [value / 255 for value in colour[:3]]
    linear = [
        s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_on_either_background(page: Page, scheme: str) -> None:
    """At least 4.5 : 1, the contrast that accessibility rules ask for, to what lies behind it."""
    from PIL import Image

    page.emulate_media(color_scheme=scheme)
    texts = page.evaluate(
        """() => {
            const kinds = ['p', 'th', 'td', 'figcaption', '.note', 'a', 'pre', 'svg text'];
            return kinds.flatMap(kind => [...document.querySelectorAll('section ' + kind)])
                .filter(element => element.checkVisibility())
                .map(element => {
                    const box = element.getBoundingClientRect();
                    const style = getComputedStyle(element);
                    const fill = element.closest('svg') ? style.fill : style.color;
                    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
                    return [fill.match(/[0-9.]+/g).map(Number), x, y + scrollY];
                });
        }"""
    )
    page.add_style_tag(
        content="section * { color: transparent !important } text { opacity: 0 }"
    )
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    ratios = []
    for fill, x, y in texts:
        if x < shot.width:  # else scrolled out of sight
            background: Any = shot.getpixel((int(x), int(y)))
            dark, light = sorted([luminance(fill), luminance(background)])
            ratios.append((light + 0.05) / (dark + 0.05))
    assert len(ratios) > 40 and min(ratios) >= 4.5


def test_it_prints(page: Page) -> None:
    page.emulate_media(media="print", color_scheme="dark")
    paper = page.evaluate(
        "getComputedStyle(document.querySelector('section')).backgroundColor"
    )
    assert paper == "rgb(255, 255, 255)"
    assert page.pdf(format="A4")[:4] == b"%PDF"
