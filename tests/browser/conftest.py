"""A headless browser, and pages in it that may neither complain nor talk to others."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

FLAGS = (
    *(
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update"),
)
SLOW = 60_000  # ms: two batches of SCAP on a busy machine
Page = Any  # of Playwright, which is in the browser's environment only
OpenPage = Callable[..., AbstractContextManager[Page]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "no chromium: `make test-browser` installs it"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> OpenPage:
    """``open_page(url)``: a page whose errors and requests beyond ``url`` fail the test."""

    @contextmanager
    def open(url: str, **options: Any) -> Iterator[Page]:
        complaints: list[str] = []
        requests: list[str] = []
        page = browser.new_page(**options)
        page.set_default_timeout(SLOW)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda n: complaints.append(n.text) if n.type == "error" else None,
        )
        page.on("request", lambda request: requests.append(request.url))
        page.goto(url)
        yield page
        page.close()
        foreign = [
            one for one in requests if not one.startswith((url, "data:", "blob:"))
        ]
        assert complaints == [] and foreign == []

    return open
