"""The scheduler: order, turns, refusals; alone and under the service."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from cliquetta.serve.errors import ServiceError
from cliquetta.serve.service import FairPool
from cliquetta.serve.settings import Limits
from tests._helpers.serve_setup import ALICE, BOB, Gate, batch_of, bearer, refusal, wait_until
from tests.serve.conftest import Serve


def make_pool(workers: int = 1, **more: Any) -> FairPool:
    bounds = {"queued": 100, "queued_per_owner": 90, "queued_per_session": 50}
    values: dict[str, Any] = {**bounds, "wait_seconds": 30, **more}
    return FairPool(workers, Limits(**values))


@contextmanager
def held(pool: FairPool) -> Iterator[None]:
    """Keep one worker busy inside the block; all that was submitted is done after it."""
    gate, begun = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return gate.wait(10)

    pool.submit("owner", "held", wait)
    assert begun.wait(10)
    yield
    gate.set()
    pool.close()


def test_a_greedy_session_waits_its_turn() -> None:
    pool = make_pool()
    done: list[Any] = []
    with held(pool):
        for name, count in (("greedy", 10), ("a", 2), ("b", 2)):
            for i in range(count):
                pool.submit("owner", name, partial(done.append, (name, i)))
    assert done[:6] == [("greedy", 0), ("a", 0), ("b", 0), ("greedy", 1), ("a", 1), ("b", 1)]
    assert done[6:] == [("greedy", i) for i in range(2, 10)]


def test_an_owner_of_many_sessions_waits_its_turn_and_learns_how_long() -> None:
    pool = make_pool(queued_per_owner=8)
    pool._mean = 2.0  # seconds of a job
    done: list[Any] = []
    with held(pool):
        for i in range(6):
            pool.submit("many", f"m{i}", partial(done.append, f"m{i}"))
        pool.submit("one", "o", partial(done.append, "o"))
        for _ in range(2):
            pool.submit("many", "m0", partial(done.append, "m0 again"))
        with pytest.raises(ServiceError) as full:
            pool.submit("many", "m9", lambda: None)
        pool.submit("one", "o", partial(done.append, "o again"))
    assert (full.value.status_code, full.value.code) == (429, "owner_busy")
    assert full.value.headers["Retry-After"] == "16"  # eight jobs of two seconds
    # one turn of each owner, whatever the number of its sessions
    assert done[:4] == ["m0", "o", "m1", "o again"]
    assert done[4:] == ["m2", "m3", "m4", "m5", "m0 again", "m0 again"]


def test_one_session_never_runs_twice_at_once() -> None:
    pool, done, inside, overlaps = make_pool(workers=4), [], set(), []

    def work(session: str, i: int) -> None:
        if session in inside:
            overlaps.append(session)
        inside.add(session)
        time.sleep(0.001)
        inside.discard(session)
        done.append((session, i))

    for i in range(20):
        for session in "abc":
            pool.submit("owner", session, partial(work, session, i))
    pool.close()
    assert overlaps == []
    assert all([i for s, i in done if s == session] == list(range(20)) for session in "abc")


def test_errors_reach_the_one_who_waits() -> None:
    pool = make_pool()
    with pytest.raises(ZeroDivisionError):
        pool.submit("owner", "a", lambda: 1 // 0).result(10)
    assert pool.submit("owner", "a", lambda: 1).result(10) == 1
    pool.close()
    with pytest.raises(ServiceError, match="shutting down"):
        pool.submit("owner", "a", lambda: 1)


def test_what_waited_too_long_is_refused_and_what_was_cancelled_is_not_done() -> None:
    pool = make_pool(wait_seconds=0.05)
    done: list[Any] = []
    with held(pool):
        late = pool.submit("owner", "late", partial(done.append, "late"))
        cancelled = pool.submit("owner", "cancelled", partial(done.append, "cancelled"))
        assert cancelled.cancel()
        time.sleep(0.1)
    with pytest.raises(ServiceError, match="waited too long"):
        late.result(10)
    assert done == []


def test_overload_is_refused_at_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(limits={"queued": 3, "queued_per_session": 2}, workers=1) as service:
        first, second, third = (service.create() for _ in range(3))
        gate = Gate(monkeypatch)
        with ThreadPoolExecutor(4) as clients:
            waiting = []
            for queue in (1, 2, 3):
                waiting.append(clients.submit(service.send, first, batch_of(queue, 1)))
                while service.metric("cliquetta_queue ") < queue:
                    pass
            assert refusal(service.send(first, batch_of(9, 1))) == (429, "session_busy")
            full = service.send(second, batch_of(9, 1))
            assert refusal(full) == (503, "overloaded")
            assert int(full.headers["Retry-After"]) >= 1
            gate.open()
            assert [one.result().status_code for one in waiting] == [200, 200, 200]
        assert service.send(second, batch_of(9, 1)).status_code == 200
        assert service.send(third, batch_of(9, 1)).status_code == 200


def test_many_sessions_do_not_delay_another(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(tokens=[ALICE, BOB], workers=1) as service:

        def send(session: str, token: str, count: int) -> int:
            path = f"/v1/sessions/{session}/batches"
            files = [("images", ("a.png", data)) for data in batch_of(0, count)]
            return service.http.post(path, files=files, headers=bearer(token)).status_code

        many, one = [service.create(token=ALICE) for _ in range(6)], service.create(token=BOB)
        gate = Gate(monkeypatch)
        with ThreadPoolExecutor(8) as clients:
            sent = []
            for session in (*many, one):
                token, count = (BOB, 1) if session == one else (ALICE, 2)
                sent.append(clients.submit(send, session, token, count))
                wait_until(lambda: service.service.pool.count == len(sent))
            gate.open()
            assert [result.result() for result in sent] == [200] * 7
    # one of Alice's batches was running, one was next; then it was Bob's turn
    assert gate.images.index(1) <= 2 and gate.images.count(2) == 6
