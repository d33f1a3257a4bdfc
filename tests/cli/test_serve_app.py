"""``cliquetta app``: its limits, and what it refuses."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from cliquetta.app import server as app_server
from cliquetta.cli.main import app as command
from cliquetta.serve.settings import Limits


def test_photographs_fit_and_every_limit_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Limits] = []
    monkeypatch.setitem(sys.modules, "cliquetta.app.interface", ModuleType("interface"))
    monkeypatch.setattr(app_server, "serve", lambda given, **_: started.append(given.limits))
    run = CliRunner().invoke
    assert run(command, ["app", "--device", "cpu"]).exit_code == 0
    assert run(command, ["app", "--device", "cpu", "--limit", "body_bytes=7"]).exit_code == 0
    assert started[0].body_bytes > Limits().body_bytes and started[1].body_bytes == 7
    refused = run(command, ["app", "--limit", "image=3"])
    assert refused.exit_code == 2 and "did you mean 'images'" in refused.output


def test_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cliquetta.app.interface", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = CliRunner().invoke(command, ["app"])
    assert result.exit_code == 2
    assert "cliquetta[app]" in " ".join(result.output.split())
