"""``cliquetta sessions``: operators list, delete, export and import, beside a running server."""

import json
from pathlib import Path
from typing import Any

import pytest

from cliquetta.model.clip import CLIP
from tests._helpers.postgres import PostgreSQL
from tests._helpers.postgres import postgresql as postgresql
from tests._helpers.running import Run
from tests._helpers.serve_setup import Alone, batch_of, local_service, make_older
from tests.serve.conftest import alone as alone


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of either kind."""
    if request.param == "sqlite":
        return str(tmp_path / "sessions")
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.create_database()


def listed(run: Run, where: str) -> list[dict[str, Any]]:
    """The sessions as `list --json` shows them."""
    rows: list[dict[str, Any]] = json.loads(
        run("sessions", "list", "--json", "--sessions", where).stdout
    )
    return rows


def test_operators_list_and_delete(run: Run, where: str, tiny_clip: CLIP) -> None:
    with local_service(where, tiny_clip) as service:
        first, second, third = (service.create() for _ in range(3))
        service.predict(second, batch_of(0))
        shown = listed(run, where)
        assert {one["id"]: one["images"] for one in shown} == {
            first: 0,
            second: 4,
            third: 0,
        }
        assert shown[0]["id"] == second and shown[0]["KiB"] > 0  # the largest
        assert "3 sessions in" in (
            text := run("sessions", "list", "--sessions", where).text
        )
        assert "MiB on disk" in text
        assert run("sessions", "delete", second, "--sessions", where).code == 0
        assert service.predict(first, batch_of(1))["sequence"] == 1
        assert service.send(second, batch_of(1)).status_code == 404
    unknown = run("sessions", "delete", "nothing", "--sessions", where)
    assert unknown.refuses("no session 'nothing'")
    assert run("sessions", "delete", "--sessions", where).refuses()
    make_older(where, first, 40)
    assert (
        run("sessions", "delete", "--unused-days", "30", "--sessions", where).code == 0
    )
    assert [one["id"] for one in listed(run, where)] == [third]


def test_operators_move_sessions_between_databases(
    run: Run, where: str, tiny_clip: CLIP, tmp_path: Path, alone: Alone
) -> None:
    out = tmp_path / "out"
    elsewhere = str(tmp_path / "elsewhere")
    with (
        local_service(where, tiny_clip) as service,
        local_service(elsewhere, tiny_clip) as other,
    ):
        moved = service.create()
        left = service.create()
        service.check(moved, batch_of(0), alone, sequence=1)
        assert run("sessions", "export", "--out", out, "--sessions", where).code == 0
        files = {file.stem: file for file in out.glob("*.session")}
        assert files.keys() == {moved, left}
        again = run("sessions", "export", moved, "--out", out, "--sessions", where)
        assert again.refuses("exists")
        words = ("sessions", "import", files[moved], "--sessions", elsewhere)
        assert run(*words).code == 0
        assert run(*words).refuses("already")
        other.check(moved, batch_of(1), alone, sequence=2)
        (tmp_path / "x.session").write_bytes(files[left].read_bytes()[:-1])
        damaged = run(
            "sessions", "import", tmp_path / "x.session", "--sessions", elsewhere
        )
        assert damaged.refuses()
        assert other.ids() == [moved]


def test_the_database_may_be_named_by_the_environment(
    run: Run, where: str, tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password on the command line would be shown to everyone."""
    with local_service(where, tiny_clip) as service:
        session = service.create()
    monkeypatch.setenv("CLIQUETTA_SESSIONS", where)
    (shown,) = json.loads(run("sessions", "list", "--json").stdout)
    assert shown["id"] == session
    assert "secret-of-tests" not in run("sessions", "list").text
