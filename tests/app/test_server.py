"""Who may open the app, what a page may reach, where uploads are stored."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from cliquetta.app import server as app_server
from cliquetta.app.server import POLICY, server_settings, token_auth
from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP
from cliquetta.serve.auth import Tokens
from cliquetta.serve.server import open_port
from cliquetta.serve.settings import Limits, Settings
from tests._helpers.running import child_environment

Visit = Callable[..., TestClient]


@pytest.fixture
def visit(tiny_clip: CLIP) -> Visit:
    def build(limits: Limits | None = None, host: str = "127.0.0.1:7860") -> TestClient:
        settings = Settings({"tiny": tiny_clip}, limits=limits or Limits())
        server = FastAPI(**server_settings(settings))
        server.get("/")(lambda: "page")
        server.post("/login")(lambda: "in")

        @server.post("/gradio_api/upload")
        async def upload(request: Request) -> int:
            return len(await request.body())

        return TestClient(server, base_url=f"http://{host}")

    return build


def test_only_known_hosts_and_own_pages_are_served(visit: Visit) -> None:
    http = visit()
    response = http.get("/", headers={"Origin": "http://127.0.0.1:7860"})
    assert (
        response.status_code == 200
        and response.headers["Content-Security-Policy"] == POLICY
    )
    assert http.get("/openapi.json").status_code == 404
    assert visit(host="evil.example").get("/").status_code == 403
    for headers in (
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        for path in ("/login", "/gradio_api/upload"):
            assert http.post(path, headers=headers).status_code == 403


def test_logins_are_slowed_and_uploads_are_bounded(visit: Visit) -> None:
    http = visit(Limits(upload_bytes=10_000, wrong_token_rate=0.001))
    assert [http.post("/login").status_code for _ in range(12)] == [200] * 10 + [
        429,
        429,
    ]
    path = "/gradio_api/upload"
    sent = [http.post(path, content=b"x" * 4000).status_code for _ in range(3)]
    assert sent == [200, 200, 429]
    refused = http.post(path, content=b"x" * 4000)
    assert "within an hour" in refused.text and "Retry-After" in refused.headers
    assert http.get("/").status_code == 200


APP = """
import sys, time, types
from pathlib import Path
fake = types.ModuleType("cliquetta.app.interface")
def launch(controller, **_):
    (controller.folder / "upload.png").write_bytes(b"x")
    print(controller.folder, flush=True)
    time.sleep(60)
fake.launch = launch
sys.modules["cliquetta.app.interface"] = fake
from cliquetta.app import server
from cliquetta.serve.server import open_port
from cliquetta.serve.settings import Settings
with open_port("127.0.0.1", 0) as free:
    port = free.getsockname()[1]
server.serve(Settings({"any": None}, methods={}), host="127.0.0.1", port=port)
"""


@pytest.mark.slow
def test_uploads_are_deleted_when_the_app_stops_and_after_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = child_environment(TMPDIR=str(tmp_path))
    command = [sys.executable, "-c", APP]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        folder = Path(running.stdout.readline().strip())
        assert str(running.pid) in folder.name and (folder / "upload.png").exists()
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            left = folder.with_name(
                folder.name.replace(str(running.pid), str(ended.pid))
            )
        left.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        app_server.delete_left_uploads()  # as the next start does
        assert folder.exists() and not left.exists()
        running.terminate()
    assert running.returncode == 0 and not folder.exists()


def test_a_port_in_use_is_refused_before_any_address(tiny_clip: CLIP) -> None:
    with (
        open_port("127.0.0.1", 0) as occupied,
        pytest.raises(UserError, match="in use"),
    ):
        port = occupied.getsockname()[1]
        app_server.serve(Settings({"tiny": tiny_clip}), host="127.0.0.1", port=port)


def test_tokens_are_passwords() -> None:
    opens = token_auth(Tokens(["0123456789abcdef"]))
    assert opens("anybody", "0123456789abcdef")
    assert not opens("anybody", "0123456789abcdeX") and not opens("anybody", "")


def test_the_app_is_not_opened_to_other_machines_without_tokens(
    tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(host: str, port: int) -> None:
        pytest.fail(f"the port of {host} was opened")

    monkeypatch.setattr(app_server, "open_port", refuse)
    settings = Settings({"tiny": tiny_clip})
    with pytest.raises(UserError, match="reached from other machines"):
        app_server.serve(settings, host="0.0.0.0", port=7860)
