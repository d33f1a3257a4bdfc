"""Folders and buckets that cannot hold sessions are refused at the start."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from cliquetta.errors import BusyError, UserError
from cliquetta.serve.store import Store
from cliquetta.serve.store_files import _Bucket


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
