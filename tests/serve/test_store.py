"""Session files: damage is noticed; folders and buckets that cannot hold them are refused."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from cliquetta.errors import BusyError, UserError
from cliquetta.model.clip import CLIP
from cliquetta.serve.settings import Limits
from cliquetta.serve.store import Store
from cliquetta.serve.store_files import _Bucket
from tests._helpers.serve_setup import batch_of, last_file, local_service


def restored(folder: Path, model: CLIP, session: str) -> tuple[int, str, str]:
    with local_service(folder, model) as service:
        response = service.send(session, batch_of(1))
        body = response.json()
        return response.status_code, body.get("code", ""), body.get("message", "")


def test_every_flipped_bit_is_noticed(tmp_path: Path, tiny_clip: CLIP) -> None:
    folder = tmp_path / "sessions"
    with local_service(folder, tiny_clip) as service:
        session = service.create()
        service.predict(session, batch_of(0))
    path = last_file(folder, session)
    intact = path.read_bytes()
    end = 8 + int.from_bytes(intact[:8], "little")
    draw = random.Random(0)
    indices = [draw.randrange(end, len(intact)) for _ in range(8)]
    indices += [intact.index(b"images", 0, end) + 12, intact.index(b"created", 0, end) + 14]
    for index in indices:
        damaged = bytearray(intact)  # and nothing is written after it
        damaged[index] ^= 1 << draw.randrange(3)
        path.write_bytes(bytes(damaged))
        status, code, message = restored(folder, tiny_clip, session)
        assert status in (404, 409), index  # 404: not even the head can be read
        assert status == 404 or (code == "damaged" and "checksum" in message)
    path.write_bytes(intact[:-9])
    assert restored(folder, tiny_clip, session)[0] in (404, 409)


def test_swapped_copied_and_missing_files_are_noticed(
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


def test_a_folder_has_one_service(tmp_path: Path) -> None:
    with Store.open(tmp_path), pytest.raises(BusyError), Store.open(tmp_path):
        pass


def test_stores_that_cannot_fence_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"through ftp://: use a mounted folder"):
        Store("ftp://host/x")
    with Store.open("memory://probed") as store:
        assert store.scan() == []

    def overwrite(self: _Bucket, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"{self._root}/{name}", data)

    monkeypatch.setattr(_Bucket, "create", overwrite)
    with pytest.raises(UserError, match="only if there is none"), Store.open("memory://y"):
        pass
