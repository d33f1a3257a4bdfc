"""Logs are lines without secrets."""

import json
import logging

import pytest

from cliquetta.serve.logs import JSONFormatter, LineFormatter, logging_as
from tests._helpers.serve_setup import CLASSES
from tests.serve.conftest import Serve

TOKEN = "secret-0123456789abcdef"


def test_logs_are_lines_without_secrets(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_as("json"), serve(tokens=[TOKEN]) as service:
        service.create(token=TOKEN)
        service.http.get(
            "/v1/models%0aforged?token=secret", headers={"Authorization": TOKEN}
        )
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    first, second = (line for line in lines if line["message"] == "request")
    assert (first["method"], first["route"], first["status"]) == (
        "POST",
        "/v1/sessions",
        201,
    )
    assert first["owner"] and first["seconds"] > 0 and first["bytes"] > 0
    assert (second["route"], second["status"]) == ("none", 401)
    text = json.dumps(lines)
    assert "secret" not in text and "forged" not in text and CLASSES[0] not in text


def test_line_breaks_in_messages_are_escaped() -> None:
    record = logging.LogRecord(
        "x", logging.WARNING, "", 0, "a\nERROR: %s", ("\x1b[31m\r",), None
    )
    assert LineFormatter().format(record) == "warning: a\\x0aERROR: \\x1b[31m\\x0d"
    assert "\n" not in JSONFormatter().format(record)
    assert (
        json.loads(JSONFormatter().format(record))["message"] == "a\nERROR: \x1b[31m\r"
    )
