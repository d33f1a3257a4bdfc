"""``cliquetta serve`` and ``app``: what they refuse, and what they hand to the server."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from cliquetta.app import server as app_server
from cliquetta.cli.main import app
from cliquetta.model.checkpoints.native import save_model
from cliquetta.model.clip import CLIP
from cliquetta.serve import server
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.settings import Limits

TOKEN = "0123456789abcdef0123"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the server was started with, instead of a server."""
    calls: list[dict[str, Any]] = []

    def record(settings: Any, folder: Path, *, on_ready: Any, **where: Any) -> None:
        on_ready()
        calls.append({"settings": settings, "folder": folder, **where})

    monkeypatch.setattr(server, "serve", record)
    monkeypatch.delenv("CLIQUETTA_TOKEN", raising=False)
    return calls


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "other machines"),
        (["--limit", "image=3"], "did you mean 'images'"),
        (["--limit", "images=-3"], "above 0"),
        (["--method", "coop"], "unknown method that can be served"),
        (["--model", "a=", "--method", "tent"], "NAME=PATH"),
    ],
)
def test_refusals(started: list[dict[str, Any]], arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert started == []


def test_every_line_of_a_json_log_is_json(
    monkeypatch: pytest.MonkeyPatch, tiny_clip: CLIP, tmp_path: Path
) -> None:
    class Ended:
        def run(self, sockets: object) -> None:
            """Serve nobody."""

    monkeypatch.setattr(server, "make_server", lambda *_: Ended())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    save_model(tiny_clip, tmp_path / "m.safetensors")
    words = ["serve", "--model", f"m={tmp_path}/m.safetensors", "--port", str(port)]
    words += ["--state-dir", str(tmp_path / "kept"), "--log-format", "json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    (line,) = map(json.loads, result.output.splitlines())
    assert "press Ctrl-C to stop" in line["message"]


def test_what_is_served(started: list[dict[str, Any]], tiny_clip: CLIP, tmp_path: Path) -> None:
    path, tokens = tmp_path / "m.safetensors", tmp_path / "tokens.txt"
    save_model(tiny_clip, path)
    tokens.write_text(f"# alice, {TOKEN[:-1]}\n{TOKEN}\n\n  # bob\nanother-{TOKEN}\n")
    options = ["--model", f"mine={path}", "--model", f"again={path}", "--method", "tent"]
    where = ["--host", "0.0.0.0", "--port", "9999", "--state-dir", str(tmp_path / "kept")]
    more = ["--token-file", str(tokens), "--limit", "images=7", "--workers", "3", "--device", "cpu"]
    result = CliRunner().invoke(app, ["serve", *options, *where, *more])
    assert result.exit_code == 0, result.output
    (call,) = started
    settings = call["settings"]
    assert list(settings.models) == ["mine", "again"]
    assert settings.models["mine"] is settings.models["again"]
    assert settings.models["mine"].fingerprint == tiny_clip.fingerprint
    assert list(settings.methods) == ["tent"]
    assert (settings.limits.images, settings.workers, settings.hosts) == (7, 3, None)
    assert settings.tokens.owner(f"Bearer {TOKEN}") != settings.tokens.owner(
        f"Bearer another-{TOKEN}"
    )
    with pytest.raises(ServiceError):  # a comment is not a token
        settings.tokens.owner(f"Bearer # alice, {TOKEN[:-1]}")
    assert (call["host"], call["port"], call["folder"]) == ("0.0.0.0", 9999, tmp_path / "kept")


def test_a_token_of_the_environment(
    started: list[dict[str, Any]], tiny_clip: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny_clip, tmp_path / "m.safetensors")
    arguments = ["serve", "--device", "cpu", "--model", f"m={tmp_path / 'm.safetensors'}"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert started[0]["settings"].tokens is None
    assert started[0]["settings"].hosts == {"localhost", "127.0.0.1", "::1"}
    monkeypatch.setenv("CLIQUETTA_TOKEN", TOKEN)
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert started[1]["settings"].tokens.owner(f"Bearer {TOKEN}")


def test_a_port_in_use_is_refused_before_any_address(tmp_path: Path) -> None:
    with server.open_port("127.0.0.1", 0) as occupied:
        port = str(occupied.getsockname()[1])
        where = ["--port", port, "--state-dir", str(tmp_path), "--device", "cpu"]
        result = CliRunner().invoke(app, ["serve", *where])
    assert result.exit_code == 2
    assert f"port {port} is in use" in result.output and "http://" not in result.output


def test_photographs_fit_and_every_limit_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Limits] = []
    monkeypatch.setitem(sys.modules, "cliquetta.app.interface", ModuleType("interface"))
    monkeypatch.setattr(app_server, "serve", lambda given, **_: started.append(given.limits))
    run = CliRunner().invoke
    assert run(app, ["app", "--device", "cpu"]).exit_code == 0
    assert run(app, ["app", "--device", "cpu", "--limit", "body_bytes=7"]).exit_code == 0
    assert started[0].body_bytes > Limits().body_bytes and started[1].body_bytes == 7
    refused = run(app, ["app", "--limit", "image=3"])
    assert refused.exit_code == 2 and "did you mean 'images'" in refused.output


def test_the_app_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cliquetta.app.interface", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = CliRunner().invoke(app, ["app"])
    assert result.exit_code == 2
    assert "cliquetta[app]" in " ".join(result.output.split())
