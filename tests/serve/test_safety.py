"""What strangers may not do."""

from __future__ import annotations

import pickle
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cliquetta.methods.tent import Tent
from cliquetta.model.clip import CLIP
from cliquetta.serve.auth import Tokens, check_binding, is_loopback
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.limits import RateLimiter
from cliquetta.serve.server import serve
from cliquetta.serve.settings import Limits, Settings, name_models
from cliquetta.types import Batch, Prediction
from tests._helpers.serve_setup import (
    CLASSES,
    FREE,
    Local,
    batch_of,
    live_service,
    local_service,
    picture,
)

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
MANY: dict[str, Any] = {"rate": 1e6, "burst": 10**6}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_only_known_tokens_are_let_in_and_see_their_own_sessions_only(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    tokens = Tokens([ALICE, BOB])
    with local_service(tmp_path, tiny_clip, tokens=tokens, hosts=None, host="any.org") as service:
        http = service.http
        request = {"classes": CLASSES, "method": "zero_shot"}
        wrong: list[Any] = [{}, bearer(ALICE[:-1]), bearer(ALICE + "x")]
        wrong += [{"Authorization": value} for value in (f"Basic {ALICE}", b"Bearer \xff\xfe")]
        for headers in wrong:
            refused = http.post("/v1/sessions", json=request, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"] == "Bearer"
        assert http.get("/metrics").status_code == 401
        assert http.get("/healthz").status_code == 200
        key = {"Idempotency-Key": "one"}
        made, again, theirs = (
            http.post("/v1/sessions", json=request, headers={**bearer(who), **key})
            for who in (ALICE, ALICE, BOB)
        )
        assert again.json() == made.json() and theirs.json()["id"] != made.json()["id"]
        path = f"/v1/sessions/{made.json()['id']}"
        assert http.get(path, headers=bearer(ALICE)).status_code == 200
        for method, where in (
            ("GET", path),
            ("DELETE", path),
            ("GET", f"{path}/state"),
            ("PUT", f"{path}/state"),
            ("POST", f"{path}/reset"),
            ("POST", f"{path}/batches"),
        ):
            assert http.request(method, where, headers=bearer(BOB)).status_code == 404
        assert http.get("/v1/sessions", headers=bearer(BOB)).json()["sessions"] == [theirs.json()]
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("*/*.safetensors"))
    assert kept and ALICE.encode() not in kept


def test_tokens_must_be_long_and_no_open_port_goes_without(tiny_clip: CLIP) -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Tokens(["short"])
    with pytest.raises(ValueError, match="no tokens"):
        Tokens(["", "  "])
    for host in ("127.0.0.1", "localhost", "::1", "127.8.0.1"):
        assert is_loopback(host)
        check_binding(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ValueError, match="other machines"):
            check_binding(host, None)
        check_binding(host, Tokens([ALICE]))
    with pytest.raises(ValueError, match="other machines"):
        serve(Settings(models={"tiny": tiny_clip}), "unused", host="0.0.0.0", port=1)
    assert not Path("unused").exists()


def test_web_pages_of_others_are_turned_away(service: Local) -> None:
    """A page may point its own name at 127.0.0.1, or post to it; both show in the headers."""
    get = service.http.get
    assert get("/v1/sessions", headers={"Host": "evil.org"}).status_code == 403
    assert get("/v1/sessions", headers={"Host": "localhost:8765"}).status_code == 200
    assert get("/v1/sessions", headers={"Origin": "http://evil.org"}).status_code == 403
    assert get("/v1/sessions", headers={"Origin": "null"}).status_code == 403
    assert get("/v1/sessions", headers={"Origin": "http://127.0.0.1"}).status_code == 200
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        assert get("/v1/sessions", headers={"Sec-Fetch-Site": site}).status_code == status
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert get("/docs", headers=link).status_code == 200


@pytest.mark.parametrize(
    ("limits", "request_", "words"),
    [
        ({"classes": 4}, {"classes": CLASSES}, "at most 4"),
        ({"class_length": 7}, {"classes": CLASSES}, "7 characters"),
        ({"templates": 1}, {"classes": ["a"], "templates": ["{}", "a {}"]}, "at most 1"),
        ({"state_bytes": 100}, {"classes": CLASSES}, "would remember"),
    ],
)
def test_limits_of_sessions(
    tmp_path: Path, tiny_clip: CLIP, limits: dict[str, Any], request_: dict[str, Any], words: str
) -> None:
    with local_service(tmp_path, tiny_clip, limits=Limits(**limits, **MANY)) as service:
        refused = service.http.post("/v1/sessions", json={**request_, "method": "tent"})
        assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
        assert words in refused.json()["message"]
        assert list(tmp_path.glob("*.safetensors")) == []


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("tda", {"positive_capacity": 3_000_000}),
        ("tda", {"negative_capacity": 3_000_000}),
        ("dmn", {"capacity": 3_000_000}),
        ("scap", {"capacity": 3_000_000}),
    ],
)
def test_memory_is_counted_before_it_is_allocated(
    service: Local, method: str, options: dict[str, int]
) -> None:
    service.create(method)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    request = {"classes": CLASSES, "method": method, "options": options}
    refused = service.http.post("/v1/sessions", json=request)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB, of 2 GB


def test_number_of_sessions(tmp_path: Path, tiny_clip: CLIP) -> None:
    limits = Limits(sessions=3, sessions_per_owner=2, **MANY)
    tokens = Tokens([ALICE, BOB])
    with local_service(tmp_path, tiny_clip, limits=limits, tokens=tokens, hosts=None) as service:
        request = {"classes": CLASSES, "method": "zero_shot"}

        def create(token: str) -> httpx.Response:
            return service.http.post("/v1/sessions", json=request, headers=bearer(token))  # type: ignore[return-value]

        first = create(ALICE).json()["id"]
        assert create(ALICE).status_code == 201
        assert create(ALICE).json()["code"] == "too_many_sessions"
        assert create(BOB).status_code == 201
        assert create(BOB).status_code == 429
        service.http.delete(f"/v1/sessions/{first}", headers=bearer(ALICE))
        assert create(BOB).status_code == 201


def test_limits_of_a_batch(tmp_path: Path, tiny_clip: CLIP) -> None:
    limits = Limits(images=3, image_pixels=40 * 40, view_bytes=200_000, **MANY)
    with local_service(tmp_path, tiny_clip, limits=limits) as service:
        session = service.create()
        for count in (4, 9):
            refused = service.send(session, batch_of(0, count))
            assert refused.status_code == 413 and "more than 3 images" in refused.json()["message"]
        answer = service.predict(session, [picture(1, size=40), picture(1, size=41)])
        assert [one["index"] for one in answer["predictions"]] == [0]
        assert "41 x 41" in answer["errors"][0]["reason"]
        views = service.create("mta", options={"views": 10})
        assert service.send(views, batch_of(0, 1)).status_code == 200
        refused = service.send(views, batch_of(0, 2))
        assert refused.status_code == 413 and "send fewer images" in refused.json()["message"]


def test_body_is_counted_while_it_arrives(tmp_path: Path, tiny_clip: CLIP) -> None:
    limits = Limits(body_bytes=10_000, state_bytes=200_000, **MANY)
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(10_000):
            sent += 5_000
            yield b"x" * 5_000

    with live_service(tmp_path, tiny_clip, limits=limits) as address:
        announced = httpx.post(f"{address}/v1/sessions", content=b"x" * 10_001)
        assert (announced.status_code, announced.json()["code"]) == (413, "too_large")
        headers = {"Content-Type": "application/json"}
        try:
            streamed = httpx.post(f"{address}/v1/sessions", content=parts(), headers=headers)
            assert streamed.status_code == 413
        except httpx.TransportError:
            pass  # the server hung up before all was sent
        assert sent < 50_000_000
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_a_body_that_does_not_arrive_is_not_waited_for(tmp_path: Path, tiny_clip: CLIP) -> None:
    with live_service(tmp_path, tiny_clip, limits=Limits(body_seconds=0.3, **MANY)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(
                b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_bodies_in_memory_are_bounded_together(tmp_path: Path, tiny_clip: CLIP) -> None:
    with local_service(tmp_path, tiny_clip, limits=Limits(queued_bytes=2_000, **MANY)) as service:
        session = service.create()
        refused = service.send(session, batch_of(0, 8))
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        assert service.send(session, batch_of(0, 1)).status_code == 200
        assert service.metric("cliquetta_body_bytes ") == 0


def test_rate_limit_refills_with_time() -> None:
    now = 0.0
    limiter = RateLimiter(rate=2.0, burst=3, clients=2, clock=lambda: now)
    for _ in range(3):
        limiter.take("a")
    with pytest.raises(ServiceError) as refused:
        limiter.take("a")
    assert (refused.value.status_code, refused.value.headers) == (429, {"Retry-After": "1"})
    limiter.take("b")
    now = 0.5
    limiter.take("a")
    with pytest.raises(ServiceError):
        limiter.take("a")


def test_rate_limit_holds_for_requests_and_for_guessed_tokens(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    limits, tokens = Limits(rate=0.001, burst=3, wrong_token_rate=0.001), Tokens([ALICE])
    with local_service(tmp_path, tiny_clip, limits=limits, tokens=tokens, hosts=None) as service:
        get = service.http.get
        known = [get("/v1/models", headers=bearer(ALICE)).status_code for _ in range(5)]
        assert known == [200, 200, 200, 429, 429]
    limits = Limits(wrong_token_rate=0.001)
    with local_service(tmp_path, tiny_clip, limits=limits, tokens=tokens, hosts=None) as service:
        get = service.http.get
        guesses = [get("/v1/models", headers=bearer(f"{i:020}")).status_code for i in range(12)]
        assert guesses == [401] * 10 + [429, 429]
        # were a right token answered now, a guesser would be told apart as fast as before
        assert get("/v1/models", headers=bearer(ALICE)).status_code == 429
        assert get("/healthz").status_code == 200


def test_overload_is_refused_at_once_and_passes(
    tmp_path: Path, tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), Tent._predict

    def held(self: Tent, batch: Batch) -> Prediction:
        gate.wait(20)
        return real(self, batch)

    limits = Limits(queued=3, queued_per_session=2, **MANY)
    with local_service(tmp_path, tiny_clip, limits=limits, workers=1) as service:
        first, second, third = (service.create() for _ in range(3))
        monkeypatch.setattr(Tent, "_predict", held)
        with ThreadPoolExecutor(4) as clients:
            waiting = []
            for session, queue in ((first, 1), (first, 2), (first, 3)):
                waiting.append(clients.submit(service.send, session, batch_of(queue, 1)))
                while service.metric("cliquetta_queue ") < queue:
                    pass
            busy = service.send(first, batch_of(9, 1))
            assert (busy.status_code, busy.json()["code"]) == (429, "session_busy")
            full = service.send(second, batch_of(9, 1))
            assert (full.status_code, full.json()["code"]) == (503, "overloaded")
            assert int(full.headers["Retry-After"]) >= 1
            gate.set()
            assert [one.result().status_code for one in waiting] == [200, 200, 200]
        assert service.send(second, batch_of(9, 1)).status_code == 200
        assert service.send(third, batch_of(9, 1)).status_code == 200


def test_one_token_with_many_sessions_does_not_delay_another(
    tmp_path: Path, tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real, order = threading.Event(), Tent._predict, []

    def held(self: Tent, batch: Batch) -> Prediction:
        gate.wait(30)
        order.append(len(batch))
        return real(self, batch)

    more: dict[str, Any] = {"tokens": Tokens([ALICE, BOB]), "hosts": None, "workers": 1}
    with local_service(tmp_path, tiny_clip, limits=FREE, **more) as service:
        http, request = service.http, {"classes": CLASSES, "method": "tent"}

        def create(token: str) -> str:
            made = http.post("/v1/sessions", json=request, headers=bearer(token))
            return f"/v1/sessions/{made.json()['id']}/batches"

        def send(path: str, token: str, count: int) -> int:
            files = [("images", ("a.png", data)) for data in batch_of(0, count)]
            return http.post(path, files=files, headers=bearer(token)).status_code

        many, one = [create(ALICE) for _ in range(6)], create(BOB)
        monkeypatch.setattr(Tent, "_predict", held)
        with ThreadPoolExecutor(8) as clients:
            sent = []
            for queued, (path, token, count) in enumerate(
                [*((path, ALICE, 2) for path in many), (one, BOB, 1)], start=1
            ):
                sent.append(clients.submit(send, path, token, count))
                while service.service.pool.count < queued:
                    time.sleep(0.01)
            gate.set()
            assert [result.result() for result in sent] == [200] * 7
    # one of Alice's batches was running, one was next; then it was Bob's turn
    assert order.index(1) <= 2 and order.count(2) == 6


_opened: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is None:
        return
    if event in {"pickle.find_class", "socket.connect", "subprocess.Popen", "os.system"}:
        _opened.append(f"{event} {arguments}")
    elif event == "open" and isinstance(arguments[0], str | bytes | Path):
        _opened.append(str(arguments[0]))


sys.addaudithook(_audit)  # cannot be removed; does nothing outside the test below


def test_nothing_that_a_client_names_is_opened(tmp_path: Path, tiny_clip: CLIP) -> None:
    global _opened
    bait = tmp_path / "bait.png"
    bait.write_bytes(picture(0))
    code = pickle.dumps(Path("x"))
    folder = tmp_path / "sessions"
    with local_service(folder, tiny_clip, limits=FREE) as service:
        session = service.create()
        service.send(session, [*batch_of(0), b"?"])  # decoders are imported now
        _opened = []
        try:
            for name in (str(bait), f"file://{bait}", "http://127.0.0.1:1/a", "hf:a/b", "../tiny"):
                request = {"classes": CLASSES, "method": "tent", "model": name}
                assert service.http.post("/v1/sessions", json=request).status_code == 422
                for path in (f"/v1/sessions/{name}", f"/v1/sessions/%2e%2e%2f{session}"):
                    assert service.http.get(path).status_code in {404, 405}
                body = {"images": [{"name": name, "data": ""}]}
                answer = service.http.post(f"/v1/sessions/{session}/batches", json=body)
                assert "empty" in answer.json()["errors"][0]["reason"]
            service.send(session, [code, str(bait).encode(), b"%!PS-Adobe-3.0 EPSF-3.0\n" * 9])
            refused = service.http.put(f"/v1/sessions/{session}/state", content=code)
            assert refused.status_code == 422
        finally:
            opened, _opened = _opened, None
    strange = [path for path in opened if not path.startswith(str(folder))]
    assert strange == []
    assert opened  # the hook sees the service's own files


def test_operators_name_models_and_limits_plainly() -> None:
    assert name_models(["micro", "b16=/models/b.pt"]) == {"micro": "micro", "b16": "/models/b.pt"}
    for bad in (["=x"], ["a="], ["a", "a=b"]):
        with pytest.raises(ValueError, match="model"):
            name_models(bad)
    assert Limits.from_text({"images": "7", "rate": "0.5"}) == Limits(images=7, rate=0.5)
    with pytest.raises(KeyError, match="did you mean 'images'"):
        Limits.from_text({"image": "7"})
    with pytest.raises(ValueError, match="is a number"):
        Limits.from_text({"images": "many"})
    with pytest.raises(ValueError, match="above 0"):
        Limits.from_text({"images": "0"})
