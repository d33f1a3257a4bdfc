"""Session files: damage is noticed, sessions expire, operators list and delete them."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from typer.testing import CliRunner

from cliquetta.cli.main import app
from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP
from cliquetta.serve.settings import Limits
from cliquetta.serve.store import Store
from tests._helpers.serve_setup import Local, batch_of, local_service, probabilities

DAY = 86400


def last_file(folder: Path, session: str) -> Path:
    return max((folder / session).glob("*.safetensors"))


def restored(folder: Path, model: CLIP, session: str) -> tuple[int, str, str]:
    with local_service(folder, model) as service:
        answer = service.send(session, batch_of(1))
        body = answer.json()
        return answer.status_code, body.get("code", ""), body.get("message", "")


def test_every_flipped_bit_is_noticed(tmp_path: Path, tiny_clip: CLIP) -> None:
    folder = tmp_path / "sessions"
    with local_service(folder, tiny_clip) as service:
        session = service.create()
        service.predict(session, batch_of(0))
    path = last_file(folder, session)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    places = [draw.randrange(end, len(whole)) for _ in range(8)]
    places += [whole.index(b"images", 0, end) + 12, whole.index(b"created", 0, end) + 14]
    for place in places:
        damaged = bytearray(whole)  # and nothing is written after it
        damaged[place] ^= 1 << draw.randrange(3)
        path.write_bytes(bytes(damaged))
        status, code, message = restored(folder, tiny_clip, session)
        assert status in (404, 409), place  # 404: not even the head can be read
        assert status == 404 or (code == "damaged" and "checksum" in message)
    path.write_bytes(whole[:-9])
    assert restored(folder, tiny_clip, session)[0] in (404, 409)


def test_swapped_copied_and_missing_files_are_told(
    tmp_path: Path, tiny_clip: CLIP, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(resident_sessions=1, rate=1e6, burst=10**6)
    with local_service(tmp_path, tiny_clip, limits=limits) as service:
        first, second, third = (service.create() for _ in range(3))
        one, other = (last_file(tmp_path, id) for id in (first, second))
        one.rename(tmp_path / "x")
        other.rename(one)
        (tmp_path / "x").rename(other)
        refused = service.send(first, batch_of(0))
        assert (refused.status_code, refused.json()["code"]) == (409, "damaged")
        assert f"holds session {second}" in refused.json()["message"]
        other.unlink()
        assert "is gone" in service.send(second, batch_of(0)).json()["message"]
        assert service.send(third, batch_of(0)).status_code == 200
    shutil.copytree(tmp_path / third, tmp_path / ("c" * 32))
    with local_service(tmp_path, tiny_clip) as service:
        listed = service.http.get("/v1/sessions").json()["sessions"]
        assert {info["id"] for info in listed} == {third}
    assert "copied or swapped" in caplog.text


def _age(folder: Path, session: str, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(last_file(folder, session), (then, then))


def test_sessions_expire_and_those_in_use_do_not(tmp_path: Path, tiny_clip: CLIP) -> None:
    with local_service(tmp_path, tiny_clip) as service:
        old, used, new = (service.create() for _ in range(3))
    _age(tmp_path, old, 9)
    _age(tmp_path, used, 6.9)
    with local_service(tmp_path, tiny_clip) as service:  # no --session-days
        assert service.http.get(f"/v1/sessions/{old}").status_code == 200
    with local_service(tmp_path, tiny_clip, session_days=7) as service:
        service.predict(used, batch_of(0))
        for _ in range(100):
            listed = service.http.get("/v1/sessions").json()["sessions"]
            if len(listed) == 2:
                break
            time.sleep(0.05)
        assert {info["id"] for info in listed} == {used, new}
        service.service.sessions.entries[used].used -= 6.9 * DAY  # it was used just now
        service.service.sweep()
        service.predict(used, batch_of(1))
    sizes = {path.parent.name: path.stat().st_size for path in tmp_path.glob("*/*.safetensors")}
    assert {id for id, size in sizes.items() if size} == {used, new}


def test_a_disk_that_fails_once_does_not_end_the_sweeps(
    tmp_path: Path, tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cliquetta.serve.asgi._SWEEP_SECONDS", 0.02)
    errors, collect = [OSError(5, "Input/output error")] * 2, Store.collect

    def failing(store: Store) -> None:
        if errors:
            raise errors.pop()
        collect(store)

    with local_service(tmp_path, tiny_clip) as service:
        _age(tmp_path, service.create(), 8)
    monkeypatch.setattr(Store, "collect", failing)
    with local_service(tmp_path, tiny_clip, session_days=7) as service:
        end = time.monotonic() + 20
        while service.http.get("/v1/sessions").json()["sessions"]:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_folder_without_hard_links_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with Store.open(tmp_path):
        assert not list(tmp_path.glob(".probe*"))
    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(UserError, match="hard links"), Store.open(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


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
    _age(tmp_path, first, 40)
    assert run("delete", "--unused-days", "30", *where).exit_code == 0
    assert [one["id"] for one in json.loads(run("list", "--json", *where).output)] == [third]
    assert run("list", "--state-dir", str(tmp_path / "none")).exit_code == 2


def test_health_tells_a_full_disk(service: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 4096))
        told = service.http.get("/healthz")
        assert told.status_code == 503 and told.json()["code"] == "storage"
        assert "full" in told.json()["message"]
    assert service.http.get("/healthz").status_code == 200
    session = service.create()

    def fail(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("cliquetta.serve.store_files.create_atomically", fail)
        assert service.send(session, batch_of(0)).status_code == 503
        assert service.http.get("/healthz").status_code == 503
        assert service.metric("cliquetta_store_errors_total") == 1
    assert service.send(session, batch_of(0)).status_code == 200
    assert service.http.get("/healthz").status_code == 200


@pytest.mark.parametrize("value", ["counter", "header"])
def test_bad_states_are_never_a_server_error(service: Local, value: str) -> None:
    session, fresh = service.create("scap"), service.create("scap")
    service.predict(session, batch_of(0))
    path = f"/v1/sessions/{session}/state"
    state = service.http.get(path).content
    if value == "counter":
        size = int.from_bytes(state[:8], "little")
        metadata = json.loads(state[8 : 8 + size])["__metadata__"]
        tensors = load(state)
        tensors["memory.count"] = torch.full_like(tensors["memory.count"], 2**40)
        state = save(tensors, metadata=metadata)
    else:
        state = state.replace(b'\\"images\\"', b'\\"imag\xff\xfe\\"').replace(
            b"weights", b"weigh\xc3s"
        )
    given = service.http.put(path, content=state)
    assert given.status_code in (200, 422)
    for number in range(3):
        assert service.send(session, batch_of(number)).status_code in (200, 422)
    assert service.http.post(f"/v1/sessions/{session}/reset").status_code == 200
    answer = service.predict(session, batch_of(5))
    assert probabilities(answer) == probabilities(service.predict(fresh, batch_of(5)))
