"""``cliquetta sessions``: operators list and delete them."""

import json
from pathlib import Path
from typing import Any

from cliquetta.model.clip import CLIP
from tests._helpers.running import Run
from tests._helpers.serve_setup import batch_of, local_service, make_older


def test_operators_list_and_delete(run: Run, tmp_path: Path, tiny_clip: CLIP) -> None:
    def listed() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(run("sessions", "list", "--json", *where).stdout)
        return rows

    where = ("--state-dir", tmp_path)
    with local_service(tmp_path, tiny_clip) as service:
        first, second, third = (service.create() for _ in range(3))
        service.predict(second, batch_of(0))
        assert {one["id"]: one["images"] for one in listed()} == {first: 0, second: 4, third: 0}
        assert run("sessions", "delete", second, *where).code == 0  # although the server runs
        assert service.send(second, batch_of(1)).status_code == 404
        service.service.sweep()
        assert len(service.service.sessions.residents) == 2
    assert "no session 'nothing'" in run("sessions", "delete", "nothing", *where).text
    assert run("sessions", "delete", *where).refuses()
    make_older(tmp_path, first, 40)
    assert run("sessions", "delete", "--unused-days", "30", *where).code == 0
    assert [one["id"] for one in listed()] == [third]
    assert run("sessions", "list", "--state-dir", tmp_path / "none").refuses()
