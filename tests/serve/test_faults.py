"""A server that is killed again and again loses nothing that it acknowledged."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cliquetta.model.checkpoints.local import save_model
from cliquetta.model.clip import CLIP
from cliquetta.serve import changes
from cliquetta.serve.client import Client
from cliquetta.serve.store import Store
from tests._helpers.running import child_environment
from tests._helpers.serve_setup import CLASSES, Alone, Load, free_port, is_up, wait_until

CLIENTS = 3  # one more than the server keeps in memory


class Server:
    """A server process that can be killed and started again."""

    def __init__(self, zygote: Any, port: int) -> None:
        self._zygote = zygote
        self.address = f"http://127.0.0.1:{port}"

    def start(self) -> int:
        """Start it and wait until it answers; returns its process id."""
        print(file=self._zygote.stdin, flush=True)
        pid = int(self._zygote.stdout.readline())
        wait_until(lambda: is_up(self.address))
        return pid

    def kill(self, pid: int) -> None:
        """SIGKILL, and wait until it is gone."""
        os.kill(pid, signal.SIGKILL)
        assert self._zygote.stdout.readline() == "gone\n"


@contextmanager
def servers(model: Path, folder: Path, smallest: int) -> Iterator[Server]:
    port = free_port()
    words = [sys.executable, "-m", "tests._helpers.zygote", model, folder, port, smallest]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, words)), env=child_environment(), **pipes) as zygote:
        try:
            yield Server(zygote, port)
        finally:
            zygote.kill()


def _check_disk(folder: Path, loads: list[Load], acknowledged: list[int]) -> None:
    """Every acknowledged batch is on disk, and at most the one under way besides."""
    stored = {one.info.id: one.info.sequence for one in Store(folder).scan()}
    for one, count in zip(loads, acknowledged, strict=True):
        now = len(one.responses)  # may have grown by an answer that was in the wire
        assert count <= stored[one.session.id] <= now + 1


@pytest.mark.slow
@pytest.mark.parametrize("smallest", [0, changes.SMALLEST], ids=["changes", "whole"])
def test_killed_servers_lose_nothing(tmp_path: Path, tiny_clip: CLIP, smallest: int) -> None:
    folder, model = tmp_path / "sessions", tmp_path / "tiny.safetensors"
    save_model(tiny_clip, model)
    with servers(model, folder, smallest) as server, Client(server.address) as client:
        pid = server.start()
        loads = [Load(i, client.create_session(CLASSES, method="tent")) for i in range(CLIENTS)]
        for more in (1, 2, 3, 8):  # as soon as so many answers have come, others being under way
            aim = sum(len(one.responses) for one in loads) + more
            while sum(len(one.responses) for one in loads) < aim:
                time.sleep(0.005)
            acknowledged = [len(one.responses) for one in loads]
            server.kill(pid)
            _check_disk(folder, loads, acknowledged)
            pid = server.start()
        for one in loads:
            one.stop()
        states = [one.session.export_state() for one in loads]
        server.kill(pid)
    for one, state in zip(loads, states, strict=True):
        one.check(state, Alone(tiny_clip))
