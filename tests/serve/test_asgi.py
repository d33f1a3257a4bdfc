"""Lists, health and pages of the service; nothing that a client names is opened."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from cliquetta.model.clip import CLIP
from tests._helpers.serve_setup import Local, batch_of, picture


def test_health_models_methods_settings_and_metrics(
    service: Local, tiny_clip: CLIP
) -> None:
    assert service.http.get("/healthz").json()["status"] == "ok"
    models = service.http.get("/v1/models").json()["models"]
    assert [(m["name"], m["weights"]) for m in models] == [
        ("tiny", tiny_clip.fingerprint)
    ]
    methods = {m["name"]: m for m in service.http.get("/v1/methods").json()["methods"]}
    assert methods["tent"]["config"]["betas"] == [0.9, 0.999]
    session = service.create("zero_shot", options={"temperature": 2.0}, seed=3)
    info = service.info(session)
    assert (info["config"], info["seed"]) == ({"temperature": 2.0}, 3)
    for _ in range(2):
        service.predict(session, [*batch_of(0), b"bad"], sequence=1)
    assert service.metric('cliquetta_images_total{result="predicted"}') == 4
    assert service.metric('cliquetta_images_total{result="refused"}') == 1
    assert service.metric("cliquetta_replays_total") == 1
    assert service.metric("cliquetta_sessions ") == 1


PAGES = {"/": "text/html", "/docs": "text/html", "/docs.js": "text/javascript"}
PAGES |= {"/style.css": "text/css", "/v1/models": "application/json"}


@pytest.mark.parametrize("path", PAGES)
def test_the_pages_of_the_service_load_nothing_from_elsewhere(
    service: Local, path: str
) -> None:
    page = service.http.get(path)
    assert page.status_code == 200 and page.headers["Content-Type"].startswith(
        PAGES[path]
    )
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not [
        w for w in ("http://", "https://", "<style", "onclick") if w in page.text
    ]


_opened: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is None:
        return
    if event in {
        "pickle.find_class",
        "socket.connect",
        "subprocess.Popen",
        "os.system",
    }:
        _opened.append(f"{event} {arguments}")
    elif event == "open" and isinstance(arguments[0], str | bytes | Path):
        _opened.append(str(arguments[0]))


sys.addaudithook(_audit)  # cannot be removed; does nothing outside the test below


def test_nothing_that_a_client_names_is_opened(
    service: Local, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    global _opened
    bait = tmp_path_factory.mktemp("elsewhere") / "bait.png"
    bait.write_bytes(picture(0))
    code = pickle.dumps(Path("x"))
    session = service.create()
    service.send(session, [*batch_of(0), b"?"])  # decoders are imported now
    _opened = []
    try:
        (tmp_path / "seen").write_bytes(b"")
        for name in (
            str(bait),
            f"file://{bait}",
            "http://127.0.0.1:1/a",
            "hf:a/b",
            "../tiny",
        ):
            assert service.post(model=name).status_code == 422
            for path in (f"/v1/sessions/{name}", f"/v1/sessions/%2e%2e%2f{session}"):
                assert service.http.get(path).status_code in {404, 405}
            body = {"images": [{"name": name, "data": ""}]}
            response = service.http.post(f"/v1/sessions/{session}/batches", json=body)
            assert "empty" in response.json()["errors"][0]["reason"]
        service.send(
            session, [code, str(bait).encode(), b"%!PS-Adobe-3.0 EPSF-3.0\n" * 9]
        )
        refused = service.http.put(f"/v1/sessions/{session}/state", content=code)
        assert refused.status_code == 422
    finally:
        opened, _opened = _opened, None
    assert str(tmp_path / "seen") in opened  # the hook works
    assert [path for path in opened if not path.startswith(str(tmp_path))] == []
