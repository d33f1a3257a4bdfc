"""A server that is killed again and again loses nothing that it acknowledged."""

import multiprocessing
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from cliquetta.serve import changes
from cliquetta.serve.client import Client
from cliquetta.serve.server import serve
from cliquetta.serve.settings import Limits, Settings, load_models
from cliquetta.serve.store import Store
from tests._helpers.serve_setup import CLASSES, MANY, Alone, Load, free_port, is_up, wait_until

CLIENTS = 3  # one more than the server keeps in memory


def run_server(model: Path, folder: Path, port: int, smallest: int) -> None:
    """Serve until this process is killed; memories of ``smallest`` bytes are written as changes."""
    torch.set_num_threads(1)
    changes.SMALLEST = smallest
    most = 2 if smallest else 8  # one that is restored is written in full
    limits = Limits(**MANY, resident_sessions=most)
    models = load_models({"tiny": str(model)}, create_model)
    serve(Settings(models, limits=limits, workers=2), folder, host="127.0.0.1", port=port)


@pytest.mark.slow
@pytest.mark.parametrize("smallest", [0, changes.SMALLEST], ids=["changes", "full"])
def test_killed_servers_lose_nothing(
    tmp_path: Path, tiny_clip: CLIP, tiny_file: Path, smallest: int
) -> None:
    folder, port = tmp_path / "sessions", free_port()
    address = f"http://127.0.0.1:{port}"
    context = multiprocessing.get_context("forkserver")  # imports once; each server is a fork
    context.set_forkserver_preload([__name__])

    def start() -> BaseProcess:
        words = tiny_file, folder, port, smallest
        server = context.Process(target=run_server, args=words, daemon=True)
        server.start()
        wait_until(lambda: is_up(address))
        return server

    def kill(server: BaseProcess) -> None:
        server.kill()
        server.join()

    with Client(address) as client:
        server = start()
        loads = [Load(i, client.create_session(CLASSES, method="tent")) for i in range(CLIENTS)]
        for more in (1, 2, 3, 8):  # as soon as so many responses have come, others being under way
            aim = sum(len(one.responses) for one in loads) + more
            while sum(len(one.responses) for one in loads) < aim:
                time.sleep(0.005)
            acknowledged = [len(one.responses) for one in loads]
            kill(server)
            # every acknowledged batch is on disk, and at most the one under way besides
            stored = {one.info.id: one.info.sequence for one in Store(folder).scan()}
            for one, count in zip(loads, acknowledged, strict=True):
                now = len(one.responses)  # may have grown by a response that was in the wire
                assert count <= stored[one.session.id] <= now + 1
            server = start()
        for one in loads:
            one.stop()
        states = [one.session.export_state() for one in loads]
        kill(server)
    for one, state in zip(loads, states, strict=True):
        one.check(state, Alone(tiny_clip))
