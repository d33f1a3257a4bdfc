"""``cliquetta sessions``: operators list and delete them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cliquetta.cli.main import app
from cliquetta.model.clip import CLIP
from tests._helpers.serve_setup import batch_of, local_service, make_older


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["sessions", *words])


def test_operators_list_and_delete(tmp_path: Path, tiny_clip: CLIP) -> None:
    where = ("--state-dir", str(tmp_path))
    with local_service(tmp_path, tiny_clip) as service:
        first, second, third = (service.create() for _ in range(3))
        service.predict(second, batch_of(0))
        listed = json.loads(run("list", "--json", *where).output)
        assert {one["id"]: one["images"] for one in listed} == {first: 0, second: 4, third: 0}
        assert run("delete", second, *where).exit_code == 0  # although the server runs
        assert service.send(second, batch_of(1)).status_code == 404
        service.service.sweep()
        assert len(service.service.sessions.residents) == 2
    assert "no session 'nothing'" in run("delete", "nothing", *where).output
    assert run("delete", *where).exit_code == 2
    make_older(tmp_path, first, 40)
    assert run("delete", "--unused-days", "30", *where).exit_code == 0
    assert [one["id"] for one in json.loads(run("list", "--json", *where).output)] == [third]
    assert run("list", "--state-dir", str(tmp_path / "none")).exit_code == 2
