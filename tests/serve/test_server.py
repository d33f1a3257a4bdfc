"""Connections are bounded before a request begins and after a response is made."""

import contextlib
import multiprocessing
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpcore
import httpx
import pytest
import torch
from fastapi import FastAPI

from cliquetta.methods.tent import Tent
from cliquetta.model.factory import create_model
from cliquetta.serve.client import Client, RemoteError, UnreachableError
from cliquetta.serve.server import BoundedProtocol, make_server, serve
from cliquetta.serve.session_store import SessionStore
from cliquetta.serve.settings import Limits, Settings, load_models
from cliquetta.types import Batch, Prediction
from tests._helpers.serve_setup import (
    CLASSES,
    Gate,
    batch_of,
    free_port,
    is_up,
    refusal,
    wait_until,
)
from tests.serve.conftest import ServeLive, connect

GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes a connection without a word more."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(100) == b""
    return True


@pytest.mark.parametrize("start", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127"])
def test_a_head_that_does_not_arrive_is_not_waited_for(
    serve_live: ServeLive, start: bytes
) -> None:
    with serve_live(limits={"header_seconds": 0.4}) as address:
        with connect(address) as silent:
            silent.sendall(start)
            assert is_closed(silent)
        # a byte now and then does not extend the time
        with connect(address) as dripping, contextlib.suppress(ConnectionError):
            for byte in b"GET /healthz HTTP/1.1\r\n" * 100:
                dripping.sendall(bytes([byte]))
                time.sleep(0.05)
            raise AssertionError("the connection stayed open")
        with connect(address) as second:  # also on a connection that was used before
            second.sendall(GET)
            while not second.recv(4096).endswith(b"}"):
                pass
            second.sendall(b"GET /healthz")
            assert is_closed(second)
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_a_connection_stays_open_longer_than_clients_use_it() -> None:
    # else a request is lost that is sent when the server closes
    idle_seconds = make_server(FastAPI(), Limits()).config.timeout_keep_alive
    pool = httpx.HTTPTransport()._pool
    assert isinstance(pool, httpcore.ConnectionPool)
    assert (
        pool._keepalive_expiry is not None and idle_seconds > 2 * pool._keepalive_expiry
    )


def test_an_idle_connection_is_closed_in_the_end(serve_live: ServeLive) -> None:
    with serve_live(limits={"idle_seconds": 0.3}) as address, connect(address) as idle:
        idle.sendall(GET)
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        while idle.recv(4096):
            pass


def test_responses_are_not_delayed(
    serve_live: ServeLive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the body of a response waits for the acknowledgement of its head: 40 ms each."""
    options = []
    real = BoundedProtocol.on_response_complete

    def look(self: BoundedProtocol) -> None:
        opened = self.transport.get_extra_info("socket")
        options.append(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        real(self)

    monkeypatch.setattr(BoundedProtocol, "on_response_complete", look)
    with serve_live() as address:
        httpx.get(f"{address}/healthz")
    assert options == [1]


def test_silent_connections_make_room_for_others(serve_live: ServeLive) -> None:
    with (
        serve_live(limits={"connections": 5}) as address,
        contextlib.ExitStack() as all,
    ):
        for _ in range(40):
            all.enter_context(connect(address))
        for _ in range(10):
            assert httpx.get(f"{address}/healthz").status_code == 200


def test_busy_connections_stay(
    serve_live: ServeLive, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_live(limits={"connections": 2}) as address:
        with Client(address) as client:
            sessions = [
                client.create_session(CLASSES, method="tent").id for _ in range(2)
            ]
        gate = Gate(monkeypatch)
        with ThreadPoolExecutor(2) as clients:
            files = {"images": ("a.png", batch_of(0, 1)[0])}
            paths = [f"{address}/v1/sessions/{id}/batches" for id in sessions]
            waiting = [
                clients.submit(httpx.post, path, files=files, timeout=60)
                for path in paths
            ]
            assert gate.begun.acquire(timeout=30) and gate.begun.acquire(timeout=30)
            with connect(address) as beyond:
                refused = beyond.recv(100)
            gate.open()
            assert [one.result().status_code for one in waiting] == [200, 200]
        assert refused.startswith(b"HTTP/1.1 503")


def test_responses_that_nobody_reads_are_counted_and_dropped(
    serve_live: ServeLive,
) -> None:
    request = {
        "classes": CLASSES,
        "method": "tda",
        "options": {"positive_capacity": 20_000},
    }
    with serve_live(
        limits={"response_seconds": 1.5, "queued_bytes": 25_000_000}
    ) as address:
        session = httpx.post(f"{address}/v1/sessions", json=request).json()["id"]
        path = f"/v1/sessions/{session}/state"

        def body_bytes() -> float:
            text = httpx.get(f"{address}/metrics").text
            return float(text.partition("\ncliquetta_body_bytes ")[2].split()[0])

        state = httpx.get(address + path)
        assert 9_000_000 < len(state.content) < 12_000_000  # more than a socket buffers
        readers = [connect(address) for _ in range(4)]
        for reader in readers:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(GET.replace(b"/healthz", path.encode()))
        wait_until(lambda: body_bytes() >= 2 * len(state.content))
        assert body_bytes() <= 25_000_000
        refused = httpx.get(address + path)
        assert (
            refusal(refused) == (503, "overloaded") and "Retry-After" in refused.headers
        )
        wait_until(lambda: body_bytes() == 0)
        again = httpx.get(address + path)
        assert again.status_code == 200 and len(again.content) == len(state.content)
        for reader in readers:
            reader.close()


def serve_a_batch_that_never_ends(model: Path, folder: Path, port: int) -> None:
    """Serve in this process; Tent works for minutes on every batch."""

    def work(method: Tent, batch: Batch) -> Prediction:
        del method, batch
        end = time.monotonic() + 300
        numbers = torch.ones(100)
        while time.monotonic() < end:
            numbers = numbers * 1.0
        raise AssertionError

    Tent._predict = work  # type: ignore[method-assign, assignment]
    models = load_models({"tiny": str(model)}, create_model)
    limits = Limits(batch_seconds=300)
    serve(
        Settings(models, limits=limits, workers=1), folder, host="127.0.0.1", port=port
    )


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_sigterm_ends_a_server_within_ten_seconds(
    tmp_path: Path, tiny_file: Path, busy: bool
) -> None:
    """Also one whose work does not end: it has changed nothing, and the client may repeat it."""
    port = free_port()
    folder = tmp_path / "sessions"
    words = (tiny_file, folder, port)
    context = multiprocessing.get_context("spawn")
    server = context.Process(
        target=serve_a_batch_that_never_ends, args=words, daemon=True
    )
    server.start()
    address = f"http://127.0.0.1:{port}"
    wait_until(lambda: is_up(address))
    with Client(address, retry_seconds=0) as client, ThreadPoolExecutor(2) as clients:
        session = client.create_session(CLASSES, method="tent")
        if busy:
            waiting = [clients.submit(session.predict, batch_of(0)) for _ in range(2)]
            time.sleep(1)
        start = time.monotonic()
        server.terminate()
        server.join(30)
        assert time.monotonic() - start < 10
        assert server.exitcode == 0
        if busy:
            for one in waiting:
                assert isinstance(one.exception(30), RemoteError | UnreachableError)
    with SessionStore.open(folder) as store:
        (stored,) = store.find_all()
    assert stored.info.sequence == 0


def test_responses_do_not_say_what_serves_them(serve_live: ServeLive) -> None:
    with serve_live() as address:
        response = httpx.get(f"{address}/healthz")
    assert response.status_code == 200
    assert "server" not in response.headers
