"""Servers and databases that are killed again and again lose nothing that was acknowledged."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import torch

from cliquetta.model.clip import CLIP
from cliquetta.model.factory import create_model
from cliquetta.serve.client import Client, RemoteError, RemoteSession, UnreachableError
from cliquetta.serve.server import serve
from cliquetta.serve.session_store import SessionStore
from cliquetta.serve.settings import Limits, Settings, load_models
from tests._helpers.postgres import PostgreSQL
from tests._helpers.serve_setup import (
    CLASSES,
    MANY,
    Alone,
    Load,
    free_port,
    is_up,
    wait_until,
)

CLIENTS = 3  # one more than the server keeps in memory
SESSIONS = 6
KILLS = 30


def run_server(
    model: Path, where: str, port: int, resident: int, dies_at: int | None
) -> None:
    """Serve until this process is killed, which it does itself before a statement or a commit.

    ``dies_at`` is the number of that statement, ``resident`` of the sessions in memory.
    """
    torch.set_num_threads(1)
    left = dies_at

    def count(*_: Any) -> None:
        nonlocal left
        if left is not None:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    for event in ("before_cursor_execute", "commit"):
        sqlalchemy.event.listen(sqlalchemy.Engine, event, count)
    limits = Limits(**MANY, resident_sessions=resident)
    models = load_models({"tiny": str(model)}, create_model)
    serve(
        Settings(models, limits=limits, workers=2), where, host="127.0.0.1", port=port
    )


class Replica:
    """A server process on a port of its own, started as often as it dies."""

    def __init__(self, model: Path, where: str, *, resident: int = 8) -> None:
        self._model = model
        self._where = where
        self._resident = resident
        self._port = free_port()
        self._context = multiprocessing.get_context("forkserver")  # imports once
        self._context.set_forkserver_preload([__name__])
        self.address = f"http://127.0.0.1:{self._port}"
        self.process: BaseProcess

    def start(self, dies_at: int | None = None) -> None:
        words = (self._model, self._where, self._port, self._resident, dies_at)
        self.process = self._context.Process(target=run_server, args=words, daemon=True)
        self.process.start()

    def wait(self) -> None:
        """Wait until it responds."""
        wait_until(lambda: is_up(self.address))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.mark.slow
@pytest.mark.parametrize("resident", [2, 8], ids=["evicting", "resident"])
def test_killed_servers_lose_nothing(
    where: str, tiny_clip: CLIP, tiny_file: Path, resident: int
) -> None:
    server = Replica(tiny_file, where, resident=resident)
    server.start()
    server.wait()
    with Client(server.address) as client:
        loads = [
            Load(i, client.create_session(CLASSES, method="tent"))
            for i in range(CLIENTS)
        ]
        for more in (
            1,
            2,
            3,
            8,
        ):  # as soon as so many responses have come, others being under way
            aim = sum(len(one.responses) for one in loads) + more
            while sum(len(one.responses) for one in loads) < aim:
                time.sleep(0.005)
            acknowledged = [len(one.responses) for one in loads]
            server.kill()
            # every acknowledged batch is on disk, and at most the one under way besides
            with SessionStore.open(where) as store:
                stored = {one.info.id: one.info.sequence for one in store.find_all()}
            for one, count in zip(loads, acknowledged, strict=True):
                now = len(
                    one.responses
                )  # may have grown by a response that was in the wire
                assert count <= stored[one.session.id] <= now + 1
            server.start()
            server.wait()
        for one in loads:
            one.stop()
        states = [one.session.export_state() for one in loads]
        server.kill()
    for one, state in zip(loads, states, strict=True):
        one.check(state, Alone(tiny_clip))


class AnyReplica:
    """A session that sends each batch to one of several replicas, until one has applied it."""

    def __init__(self, sessions: Sequence[RemoteSession], seed: int) -> None:
        self._sessions, self._draw = sessions, random.Random(seed)
        self._sequence = 0

    def predict(self, images: list[bytes], *, top_k: int) -> Any:
        end = time.monotonic() + 120
        while True:
            session = self._draw.choice(self._sessions)
            session.sequence = self._sequence
            try:
                response = session.predict(images, top_k=top_k)
            except UnreachableError:
                assert time.monotonic() < end
            except RemoteError as error:
                assert error.status == 503 and time.monotonic() < end, error
            else:
                self._sequence = response.sequence
                return response
            time.sleep(0.05)


@pytest.mark.slow
def test_replicas_and_their_database_are_killed(
    postgresql: PostgreSQL, tiny_clip: CLIP, tiny_file: Path
) -> None:
    """Two replicas die between statements and PostgreSQL at any time, 30 times under load."""
    where = postgresql.create_database()
    draw = random.Random(0)
    replicas = [Replica(tiny_file, where, resident=4) for _ in range(2)]
    for replica in replicas:
        replica.start()
        replica.wait()
    clients = [
        Client(replica.address, retry_seconds=0, timeout=60) for replica in replicas
    ]
    methods = ["tent", "domain_norm", "tda"] * (SESSIONS // 3)
    ids = [clients[0].create_session(CLASSES, method=method).id for method in methods]
    loads = []
    for number, id in enumerate(ids):
        anywhere: Any = AnyReplica(
            [client.session(id) for client in clients], seed=number
        )
        loads.append(Load(number, anywhere))
    for replica in replicas:  # those that live know when they die
        replica.kill()
    kills = 0
    of_database = 0
    while kills < KILLS:
        for replica in replicas:
            if replica.process.exitcode is not None:
                kills += replica.process.exitcode == -signal.SIGKILL
                replica.start(dies_at=draw.randrange(1, 200))
        if draw.random() < 0.06:
            postgresql.kill()
            kills, of_database = kills + 1, of_database + 1
            time.sleep(draw.random())
            postgresql.start()
        time.sleep(0.1)
        assert not [one.error for one in loads if one.error]
    for replica in replicas:
        replica.kill()
        replica.start()
        replica.wait()
    before = [len(one.responses) for one in loads]
    counts = list(zip(loads, before, strict=True))
    wait_until(lambda: all(len(one.responses) > count for one, count in counts), 60)
    for one in loads:
        one.stop()
    print(f"{kills} kills, {of_database} of the database, {sum(before)} batches")
    assert of_database >= 3
    for one, id, method in zip(loads, ids, methods, strict=True):
        one.check(clients[1].session(id).export_state(), Alone(tiny_clip, method))
    for client in clients:
        client.close()
    for replica in replicas:
        replica.kill()
