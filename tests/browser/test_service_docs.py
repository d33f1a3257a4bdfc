"""The interactive description of the service works under its strict policy."""

from pathlib import Path

import pytest

from tests._helpers.serve_setup import live_service, picture
from tests._helpers.tiny import build_tiny_clip
from tests.browser.conftest import OpenPage

pytestmark = pytest.mark.browser


def test_requests_can_be_tried(open_page: OpenPage, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(0))
    with (
        live_service(tmp_path / "sessions", build_tiny_clip()) as address,
        open_page(f"{address}/") as page,
    ):
        page.click("text=Interactive description")
        page.wait_for_selector("details")

        def send(operation: str) -> str:
            page.click(f"#{operation} button")
            page.wait_for_selector(f"#{operation} > pre:visible")
            return str(page.inner_text(f"#{operation} > pre"))

        create, batch = (
            page.locator("details", has_text=text).first.get_attribute("id")
            for text in ("POST /v1/sessions", "POST /v1/sessions/{session}/batches")
        )
        assert create and batch
        page.click(f"#{create} summary")
        made = send(create)
        assert made.startswith("201") and '"method": "zero_shot"' in made
        page.click(f"#{batch} summary")
        page.fill(f"#{batch} input[type=text]", made.split('"id": "')[1].split('"')[0])
        page.set_input_files(f"#{batch} input[type=file]", tmp_path / "a.png")
        response = send(batch)
        assert response.startswith("200") and '"name": "a.png"' in response
