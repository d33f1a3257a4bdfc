"""Requests are counted and timed while they arrive."""

from collections.abc import Iterator
from contextlib import suppress

import httpx

from tests._helpers.serve_setup import ALICE, batch_of, bearer, refusal
from tests.serve.conftest import Serve, ServeLive, connect


def test_body_is_counted_while_it_arrives(serve_live: ServeLive) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(10_000):
            sent += 5_000
            yield b"x" * 5_000

    with serve_live(limits={"body_bytes": 10_000, "state_bytes": 200_000}) as address:
        announced = httpx.post(f"{address}/v1/sessions", content=b"x" * 10_001)
        assert refusal(announced) == (413, "too_large")
        headers = {"Content-Type": "application/json"}
        with suppress(
            httpx.TransportError
        ):  # where the server hangs up before all was sent
            streamed = httpx.post(
                f"{address}/v1/sessions", content=parts(), headers=headers
            )
            assert streamed.status_code == 413
        assert sent < 50_000_000
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_a_body_that_does_not_arrive_is_not_waited_for(serve_live: ServeLive) -> None:
    with serve_live(limits={"body_seconds": 0.3}) as address, connect(address) as slow:
        slow.sendall(
            b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_bodies_in_memory_are_bounded_together(serve: Serve) -> None:
    with serve(limits={"queued_bytes": 2_000}) as service:
        session = service.create()
        assert refusal(service.send(session, batch_of(0, 8))) == (503, "overloaded")
        assert service.send(session, batch_of(0, 1)).status_code == 200
        assert service.metric("cliquetta_body_bytes ") == 0


def test_rate_limit_holds_for_requests_and_for_guessed_tokens(serve: Serve) -> None:
    with serve(limits={"rate": 0.001, "burst": 3}, tokens=[ALICE]) as service:
        get = service.http.get
        known = [get("/v1/models", headers=bearer(ALICE)).status_code for _ in range(5)]
        assert known == [200, 200, 200, 429, 429]
    with serve(limits={"wrong_token_rate": 0.001}, tokens=[ALICE]) as service:
        get = service.http.get
        guesses = [
            get("/v1/models", headers=bearer(f"{i:020}")).status_code for i in range(12)
        ]
        assert guesses == [401] * 10 + [429, 429]
        # were a right token accepted now, guesses could be tested as fast as before
        assert get("/v1/models", headers=bearer(ALICE)).status_code == 429
        assert get("/healthz").status_code == 200
