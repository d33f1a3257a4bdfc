"""A headless browser uses the web app as a visitor would."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from cliquetta.data.bundled import load_bundled
from cliquetta.methods.building.registry import create_method
from cliquetta.methods.building.state import load_state
from cliquetta.model.factory import create_model
from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.running import COMMAND
from tests._helpers.serve_setup import free_port, wait_until
from tests.browser.conftest import SLOW, OpenPage, Page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("app") / "log"


@pytest.fixture(scope="module")
def address(server_log: Path) -> Iterator[str]:
    """The app as a user starts it."""
    port = free_port()
    command = [*COMMAND, "app", "--model", "micro", "--port", str(port)]
    command += ["--device", "cpu", "--threads", "1"]
    environment = {**os.environ, "TMPDIR": str(server_log.parent)}
    with server_log.open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert server.poll() is None, server_log.read_text()
        with suppress(httpx.TransportError):
            return httpx.get(url, timeout=5).is_success
        return False

    try:
        wait_until(is_up, 120)
        yield url
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def page(open_page: OpenPage, address: str) -> Iterator[Page]:
    """The page, opened; it may neither complain nor talk to another machine."""
    with open_page(address, viewport={"width": 1280, "height": 860}) as page:
        page.wait_for_selector("#next")
        yield page


def expect(images: Any) -> Any:
    """Waits for what is asked of a part of the page."""
    from playwright.sync_api import expect

    expect.set_options(timeout=SLOW)
    return expect(images)


def open_tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def choose(page: Page, id: str, value: str) -> None:
    page.locator(f"#{id} input").click()
    page.get_by_role("option", name=value, exact=True).click()


def next_batch(page: Page, number: int) -> None:
    page.click("#next")
    expect(page.locator("#notice")).to_contain_text(f"Batch {number}:")


def images_shown(page: Page, id: str) -> int:
    """Images of a part of the page, all of which must have arrived."""
    images = page.locator(f"#{id} img")
    expect(images.first).to_be_visible()
    assert images.evaluate_all(
        "all => all.every(i => i.complete && i.naturalWidth > 0)"
    )
    return images.count()


def test_a_stream_is_followed_and_its_state_downloaded(
    page: Page, tmp_path: Path
) -> None:
    """It leaves its screenshots in an existing folder named in CLIQUETTA_SCREENSHOTS."""
    shots = Path(os.environ.get("CLIQUETTA_SCREENSHOTS", tmp_path))
    assert page.locator("#method input").input_value() == "domain_norm"
    choose(page, "method", "scap")
    choose(page, "shift", "fog")
    next_batch(page, 1)
    next_batch(page, 2)
    expect(page.locator("#notice")).to_contain_text("of 32 images: zero-shot")
    assert images_shown(page, "predictions") == 16
    page.screenshot(path=shots / "app-predictions.png")

    open_tab(page, "Cliques")
    heads = page.locator("#cliques .cq-clique")
    expect(heads.first).to_contain_text(re.compile(r"\d+ images? · loss \d"))
    assert images_shown(page, "cliques") >= heads.count()

    open_tab(page, "Attention")
    page.locator("#pictures button img").nth(3).click()
    name = page.locator("#predictions img").nth(3).get_attribute("alt")
    expect(page.locator("#attention")).to_contain_text(str(name))
    expect(page.locator("#attention")).to_contain_text("plain CLIP")
    expect(page.locator("#attention")).to_contain_text(re.compile("clique|retained"))
    by_class = page.locator("#attention img").nth(1).get_attribute("src")
    page.screenshot(path=shots / "app-attention.png", full_page=True)
    page.get_by_label("rollout").check()
    expect(page.locator("#attention img").nth(1)).not_to_have_attribute(
        "src", str(by_class)
    )

    open_tab(page, "Memory")
    expect(page.locator("#memory")).to_contain_text("retained prompts")
    assert images_shown(page, "memory") == 2
    page.screenshot(path=shots / "app-memory.png", full_page=True)

    open_tab(page, "Files")
    page.click("#prepare")
    expect(page.locator("#notice")).to_contain_text("ready")
    files = {}
    for name in ("predictions.csv", "scap-state.safetensors"):
        with page.expect_download() as download:
            page.locator(f"#downloads a[download='{name}']").click()
        files[name] = tmp_path / name
        download.value.save_as(files[name])
    assert len(files["predictions.csv"].read_text().splitlines()) == 33
    adapter = create_method(
        "scap", create_model("micro"), ClassPrompts(load_bundled().names)
    )
    assert load_state(adapter, files["scap-state.safetensors"]).notes["images"] == 32
    assert int(adapter.memory["batches"]) == 2

    page.click("#reset")
    expect(page.locator("#notice")).to_contain_text("Forgotten")
    with page.expect_file_chooser() as chooser:
        page.click("#load")
    chooser.value.set_files(files["scap-state.safetensors"])
    expect(page.locator("#notice")).to_contain_text("has seen 32 images")


def test_changed_predictions_are_marked(page: Page) -> None:
    choose(page, "method", "transclip")
    choose(page, "shift", "gaussian_noise")
    next_batch(page, 1)
    notice = str(page.locator("#notice").text_content())
    images = re.search(r"transclip differs from zero-shot on (\d+)", notice)
    assert images and int(images[1]) > 0
    expect(page.locator("#predictions .cq-changed")).to_have_count(int(images[1]))
    for card in page.locator("#predictions .cq-card").all():
        before, after = card.locator("b").all_text_contents()
        assert (before != after) == ("changed" in str(card.text_content()))


def test_class_names_are_edited_while_the_stream_goes_on(page: Page) -> None:
    next_batch(page, 1)
    page.locator("#classes textarea").fill("cat, ship, truck")
    next_batch(page, 2)
    notice = page.locator("#notice")
    expect(notice).to_contain_text("what was learned about the images is kept")
    responses = page.locator("#predictions .cq-card b").all_text_contents()
    assert len(responses) == 32 and set(responses) <= {"cat", "ship", "truck"}


def test_own_images_with_a_bad_one_among_them(page: Page, tmp_path: Path) -> None:
    data = load_bundled()
    good = [tmp_path / f"photo{i}.png" for i in range(6)]
    for index, path in zip(range(0, 2000, 350), good, strict=True):
        Image.fromarray(data.images[index]).save(path)
    bad = tmp_path / "broken.jpg"
    bad.write_text("this is no picture")
    page.get_by_label("My images").check()
    page.locator("#files input[type=file]").set_input_files([*good[:3], bad, *good[3:]])
    expect(page.locator("#files a")).to_have_count(7)
    choose(page, "method", "tda")
    page.locator("#classes textarea").fill(
        "airplane, deer, <img src=nowhere>, ${1+1}, {{2}}, ship"
    )
    next_batch(page, 1)
    alert = page.locator("#notice [role=alert]")
    expect(alert).to_contain_text("1 file could not be used; the others were predicted")
    expect(alert).to_contain_text("broken.jpg: not an image")
    assert images_shown(page, "predictions") == 6
    assert page.locator("#predictions img[src=nowhere]").count() == 0
    open_tab(page, "Cliques")
    expect(page.locator("#cliques")).to_contain_text("forms no cliques")
    page.locator("#classes textarea").fill("")
    page.click("#next")
    expect(alert).to_contain_text("no class names")


def press_next(page: Page, address: str, path: str) -> str:
    """Press the button without a browser, with a path of one's own as the file; the response."""
    config = page.request.get(f"{address}/config").json()
    (press,) = (
        entry for entry in config["dependencies"] if entry["api_name"] == "on_next"
    )
    file = {"path": path, "meta": {"_type": "gradio.FileData"}}
    form = ["micro", "zero_shot", "cat, dog", "My images", "fog", 3, 4, [file]]
    asked = {
        "data": [None, "class", *form],
        "fn_index": press["id"],
        "session_hash": "stranger",
    }
    assert page.request.post(f"{address}/gradio_api/queue/join", data=asked).ok
    response = page.request.get(
        f"{address}/gradio_api/queue/data?session_hash=stranger"
    ).text()
    return next(line for line in response.splitlines() if "process_completed" in line)


def test_neither_paths_nor_addresses_of_a_visitor_are_opened(
    address: str, page: Page, tmp_path: Path, server_log: Path
) -> None:
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8)).save(secret)
    for path in (str(secret), "https://example.com/cat.png"):
        response = press_next(page, address, path)
        assert '"success":false' in response and "secret" not in response
    assert "addresses are not fetched: https://example.com" in server_log.read_text()
    for path in (f"/gradio_api/file={secret}", f"/file={secret}"):
        assert page.request.get(address + path).status in (403, 404)
