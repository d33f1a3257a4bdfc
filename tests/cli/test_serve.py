"""``cliquetta serve`` and ``app``: what they refuse, and what they hand to the server."""

import json
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cliquetta.app import server as app_server
from cliquetta.model import factory
from cliquetta.model.clip import CLIP
from cliquetta.serve import server
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.settings import Limits
from tests._helpers.running import Run

TOKEN = "0123456789abcdef0123"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of the server, which is not started."""
    calls: list[dict[str, Any]] = []

    def record(settings: Any, sessions: str, *, on_ready: Any, **where: Any) -> None:
        on_ready()
        calls.append({"settings": settings, "sessions": sessions, **where})

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
        (["--replicas", "3"], "are for --ray"),
        (["--sessions", "gs://bucket/x"], "bucket can be exported by commit 75069cc0"),
        (["--ray", "local", "--replicas", "many"], "N or MIN:MAX"),
        (["--ray", "local", "--replicas", "4:2"], "N or MIN:MAX"),
        (["--ray", "local", "--replicas", "0:1"], "N or MIN:MAX"),
        (["--ray", "local", "--sessions", "ftp://x/y"], "postgresql+psycopg://"),
        (["--ray", "ray://10.0.0.1:10001"], "need PostgreSQL"),
        (["--ray", "local", "--host", "0.0.0.0"], "other machines"),
        (["--ray", "local", "--device", "cuda:1"], "which GPU a replica gets"),
    ],
)
def test_refusals_come_before_anything_is_started(
    run: Run, started: list[dict[str, Any]], arguments: list[str], words: str
) -> None:
    assert run("serve", "--model", "micro", *arguments).refuses(words) and started == []


def test_every_line_of_a_json_log_is_json(
    run: Run, monkeypatch: pytest.MonkeyPatch, tiny_file: Path, tmp_path: Path
) -> None:
    class Ended:
        def run(self, sockets: object) -> None:
            """Serve nobody."""

    monkeypatch.setattr(server, "make_server", lambda *_: Ended())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("--model", f"m={tiny_file}", "--port", port, "--sessions", tmp_path)
    result = run("serve", *words, "--log-format", "json")
    assert result.code == 0
    (line,) = map(json.loads, (result.stdout + result.stderr).splitlines())
    assert "press Ctrl-C to stop" in line["message"]


def test_notes_and_errors_of_a_json_log_are_json_as_well(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory._note_micro.cache_clear()
    monkeypatch.delenv("CLIQUETTA_TOKEN", raising=False)
    words = ("serve", "--model", "micro", "--device", "cpu", "--log-format", "json")
    with server.open_port("127.0.0.1", 0) as occupied:
        result = run(*words, "--port", occupied.getsockname()[1])
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert result.code == 2 and result.stdout == ""
    assert "small model for demonstration" in lines[0]["message"]
    assert lines[-1]["level"] == "error" and "is in use" in lines[-1]["message"]


def test_what_is_served(
    run: Run,
    started: list[dict[str, Any]],
    tiny_clip: CLIP,
    tiny_file: Path,
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(f"# alice, {TOKEN[:-1]}\n{TOKEN}\n\n  # bob\nanother-{TOKEN}\n")
    models = (
        "--model",
        f"mine={tiny_file}",
        "--model",
        f"again={tiny_file}",
        "--method",
        "tent",
    )
    where = (
        "--host",
        "0.0.0.0",
        "--port",
        9999,
        "--sessions",
        tmp_path,
        "--device",
        "cpu",
    )
    more = ("--token-file", tokens, "--limit", "images=7", "--workers", 3)
    assert run("serve", *models, *where, *more).code == 0
    (call,) = started
    settings = call.pop("settings")
    assert call == {
        "sessions": str(tmp_path),
        "host": "0.0.0.0",
        "port": 9999,
        "log_format": "text",
    }
    assert list(settings.models) == ["mine", "again"]
    assert settings.models["mine"] is settings.models["again"]
    assert settings.models["mine"].fingerprint == tiny_clip.fingerprint
    assert list(settings.methods) == ["tent"]
    assert (settings.limits.images, settings.workers, settings.hosts) == (7, 3, None)
    one, other = (
        settings.tokens.owner(f"Bearer {token}")
        for token in (TOKEN, f"another-{TOKEN}")
    )
    assert one != other
    with pytest.raises(ServiceError):  # a comment is not a token
        settings.tokens.owner(f"Bearer # alice, {TOKEN[:-1]}")


def test_a_token_of_the_environment(
    run: Run,
    started: list[dict[str, Any]],
    tiny_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ("serve", "--device", "cpu", "--model", f"m={tiny_file}")
    assert run(*words).code == 0
    assert started[0]["settings"].tokens is None
    assert started[0]["settings"].hosts == {"localhost", "127.0.0.1", "::1"}
    monkeypatch.setenv("CLIQUETTA_TOKEN", TOKEN)
    assert run(*words).code == 0
    assert started[1]["settings"].tokens.owner(f"Bearer {TOKEN}")


def test_a_port_in_use_is_refused_before_any_address(run: Run, tmp_path: Path) -> None:
    with server.open_port("127.0.0.1", 0) as occupied:
        port = occupied.getsockname()[1]
        result = run(
            "serve",
            "--model",
            "micro",
            "--port",
            port,
            "--sessions",
            tmp_path,
            "--device",
            "cpu",
        )
    assert result.refuses(f"port {port} is in use") and "http://" not in result.text


def test_photographs_fit_and_limits_can_be_set(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Limits] = []
    monkeypatch.setitem(sys.modules, "cliquetta.app.interface", ModuleType("interface"))
    monkeypatch.setattr(
        app_server, "serve", lambda given, **_: started.append(given.limits)
    )
    assert run("app", "--model", "micro", "--device", "cpu").code == 0
    words = ("app", "--model", "micro", "--device", "cpu")
    assert run(*words, "--limit", "body_bytes=7").code == 0
    assert started[0].body_bytes > Limits().body_bytes and started[1].body_bytes == 7
    assert run(*words, "--limit", "image=3").refuses("did you mean 'images'")


def test_the_app_needs_its_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cliquetta.app.interface", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert run("app", "--model", "micro").refuses("cliquetta[app]")
