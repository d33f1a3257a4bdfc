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
from tests._helpers.serve_setup import (
    ALICE,
    BOB,
    Gate,
    batch_of,
    bearer,
    refusal,
    wait_until,
)
from tests.serve.conftest import Serve


def make_pool(workers: int = 1, **more: Any) -> FairPool:
    bounds = {"queued": 100, "queued_per_owner": 90, "queued_per_session": 50}
    values: dict[str, Any] = {**bounds, "wait_seconds": 30, **more}
    return FairPool(workers, Limits(**values))


@contextmanager
def held(pool: FairPool) -> Iterator[None]:
    """Keep one worker busy inside the block; all that was submitted is done after it."""
    gate = threading.Event()
    begun = threading.Event()

    def wait() -> bool:
        begun.set()
        return gate.wait(10)

    pool.submit("owner", "held", wait)
    assert begun.wait(10)
    yield
    gate.set()
    pool.close()


def test_owners_and_sessions_take_turns_and_learn_how_long_they_wait() -> None:
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
    # and one of each session, however much it has sent
    assert done[4:] == ["m2", "m3", "m4", "m5", "m0 again", "m0 again"]


def test_one_session_never_runs_twice_at_once() -> None:
    pool = make_pool(workers=4)
    done = []
    inside = set()
    overlaps = []

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
    assert all(
        [i for s, i in done if s == session] == list(range(20)) for session in "abc"
    )


def test_errors_reach_the_one_who_waits() -> None:
    pool = make_pool()
    with pytest.raises(ZeroDivisionError):
        pool.submit("owner", "a", lambda: 1 // 0).result(10)
    assert pool.submit("owner", "a", lambda: 1).result(10) == 1
    pool.close()
    with pytest.raises(ServiceError, match="shutting"):
        pool.submit("owner", "a", lambda: 1)


def test_what_waited_too_long_is_refused_and_what_was_cancelled_is_not_done() -> None:
    pool = make_pool(wait_seconds=0.05)
    done: list[Any] = []
    with held(pool):
        late = pool.submit("owner", "late", partial(done.append, "late"))
        cancelled = pool.submit("owner", "cancelled", partial(done.append, "cancelled"))
        assert cancelled.cancel()
        time.sleep(0.1)
    with pytest.raises(ServiceError, match="too long"):
        late.result(10)
    assert done == []


def test_overload_is_refused_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"queued": 5, "queued_per_owner": 4, "queued_per_session": 2}
    with serve(limits=limits, tokens=[ALICE, BOB], workers=1) as service:
        first, second = (service.create(token=ALICE) for _ in range(2))
        others = service.create(token=BOB)

        def send(session: str, token: str = ALICE) -> Any:
            path = f"/v1/sessions/{session}/batches"
            files = [("images", batch_of(0, 1)[0])]
            return service.http.post(path, files=files, headers=bearer(token))

        gate = Gate(monkeypatch)
        with ThreadPoolExecutor(5) as clients:
            waiting = []
            for session in (first, first, first, second):
                waiting.append(clients.submit(send, session))
                wait_until(lambda: service.service.pool.count == len(waiting))
            assert refusal(send(first)) == (429, "session_busy")
            assert refusal(send(second)) == (429, "owner_busy")
            waiting.append(clients.submit(send, others, BOB))
            wait_until(lambda: service.service.pool.count == 5)
            full = send(others, BOB)
            assert refusal(full) == (503, "overloaded")
            assert int(full.headers["Retry-After"]) >= 1
            gate.open()
            assert [one.result().status_code for one in waiting] == [200] * 5
        assert [send(session).status_code for session in (first, second)] == [200, 200]
