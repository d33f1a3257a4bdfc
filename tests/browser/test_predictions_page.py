"""The page of predictions in a browser: thousands of images, sorted and filtered, few at a time."""

from pathlib import Path
from typing import Any

import pytest

from cliquetta.inference.options import PredictOptions
from cliquetta.inference.rows import PredictionRun, RowFormat
from cliquetta.report.contact_sheet import contact_sheet
from tests._helpers.trees import noise
from tests.browser.conftest import OpenPage, Page

pytestmark = pytest.mark.browser

NAMES = ("cat", "dog", "frog")
IMAGES = 3_000


def row(path: Path, number: int) -> dict[str, Any]:
    """Labels go round, zero-shot is wrong on every second image, the method on every third."""
    label = number % 3
    after = label if number % 3 else 1
    before = label if number % 2 else 2
    return {
        "path": str(path),
        "label": NAMES[label],
        "prediction": NAMES[after],
        "probability": (number * 7919 % IMAGES) / IMAGES,
        "zero_shot_prediction": NAMES[before],
        "zero_shot_probability": 0.4,
        "error": "",
    }


@pytest.fixture(scope="module")
def sheet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three thousand images, of which there are twenty files."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    files = noise(folder, [f"{'ab'[n % 2]}/{n}.png" for n in range(20)])
    row_format = RowFormat(("tda",), NAMES, PredictOptions(labels="folder"))
    run = PredictionRun(
        rows=[row(files[number % 20], number) for number in range(IMAGES)]
    )
    for one in run.rows:
        run.count(row_format, one)
    path = folder / "page.html"
    path.write_text(contact_sheet(run), encoding="utf-8")
    return path


def titles(page: Page) -> list[str]:
    return page.locator("#tiles li").evaluate_all("all => all.map(one => one.title)")


def shown(page: Page) -> str:
    return str(page.inner_text("#status"))


def test_images_are_shown_a_hundred_at_a_time(open_page: OpenPage, sheet: Path) -> None:
    with open_page(sheet.as_uri()) as page:
        assert shown(page) == "1 to 100 of 3,000 images"
        assert page.evaluate("document.querySelectorAll('*').length") < 2_000
        assert (
            page.locator("#tiles img").first.evaluate("image => image.naturalWidth") > 0
        )
        first = titles(page)
        page.click("#next")
        assert shown(page) == "101 to 200 of 3,000 images" and len(titles(page)) == 100
        page.click("#previous")
        assert titles(page) == first


def test_what_adapting_changed_can_be_picked_out(
    open_page: OpenPage, sheet: Path
) -> None:
    numbers = range(IMAGES)
    before = [n % 2 == 1 or n % 3 == 2 for n in numbers]  # whether zero-shot is right
    after = [n % 3 != 0 for n in numbers]
    changed = [
        row(Path(), n)["prediction"] != row(Path(), n)["zero_shot_prediction"]
        for n in numbers
    ]
    expected = {
        "changed": sum(changed),
        "repaired": sum(a and not b for a, b in zip(after, before, strict=True)),
        "broken": sum(b and not a for a, b in zip(after, before, strict=True)),
    }
    with open_page(sheet.as_uri()) as page:
        for kind, count in expected.items():
            page.select_option("select[name=changed]", kind)
            assert shown(page).endswith(f"of {count:,} images"), kind
        page.select_option("select[name=changed]", "")
        page.select_option("select[name=truth]", "wrong")
        assert shown(page).endswith("of 1,000 images")
        page.select_option("select[name=folder]", label="b")
        assert shown(page).endswith("of 500 images")
        assert all("/b/" in title for title in titles(page))


def test_the_least_certain_come_first_on_request(
    open_page: OpenPage, sheet: Path
) -> None:
    with open_page(sheet.as_uri()) as page:
        page.select_option("select[name=sort]", "least")
        words = page.locator("#tiles .prediction").all_inner_texts()
        percents = [int(text.split()[-2]) for text in words]
        assert percents == sorted(percents) and percents[0] == 0
