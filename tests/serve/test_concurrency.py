"""Shared objects of the service keep their counts, budgets and order under 16 threads.

Each test fails when the lock that it is about is taken away.
"""

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from cliquetta.model.clip import CLIP
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.limits import ByteBudget, RateLimiter
from cliquetta.serve.metrics import ServiceMetrics
from cliquetta.serve.schema import SessionRequest
from cliquetta.serve.service import FairPool
from cliquetta.serve.sessions import Resident, Sessions
from cliquetta.serve.settings import Limits
from cliquetta.types import Prediction
from tests._helpers.serve_setup import (
    CLASSES,
    Alone,
    batch_of,
    check_equal,
    probabilities,
)
from tests.conftest import THREADS, SlowInt, SlowName, Together
from tests.serve.conftest import Serve

REPEATS = 20


def test_a_budget_is_never_exceeded_and_is_whole_in_the_end(together: Together) -> None:
    total = 40  # bytes, of which each thread takes 10: four may hold theirs at a time
    budget = ByteBudget(total)
    held: list[int] = []
    most_held: list[int] = []

    def take_and_give_back(_: int) -> None:
        for _ in range(REPEATS):
            try:
                budget.take(SlowInt(10))
            except ServiceError:
                continue
            held.append(10)
            most_held.append(sum(held))
            held.pop()
            budget.give_back(SlowInt(10))

    together(take_and_give_back)
    assert max(most_held) <= total
    assert budget.used == 0


def test_returned_bytes_are_all_counted(together: Together) -> None:
    budget = ByteBudget(THREADS * REPEATS)
    budget.take(THREADS * REPEATS)

    def give_back(_: int) -> None:
        for _ in range(REPEATS):
            budget.give_back(SlowInt(1))

    together(give_back)
    assert budget.used == 0


def test_a_client_gets_its_burst_and_no_request_more(together: Together) -> None:
    burst = 100
    for _ in range(REPEATS):
        limiter = RateLimiter(rate=1e-9, burst=burst)  # nothing refills meanwhile

        def ask(_: int, limiter: RateLimiter = limiter) -> int:
            allowed = 0
            for _ in range(10):
                try:
                    limiter.take(SlowName("client"))
                except ServiceError:
                    continue
                allowed += 1
            return allowed

        assert sum(together(ask)) == burst  # of 160 requests


def test_jobs_of_a_session_keep_their_order_and_never_overlap(
    together: Together,
) -> None:
    """Sixteen clients with a session each, one after the other twenty requests."""
    limits = Limits(queued=1000, queued_per_owner=1000, queued_per_session=REPEATS)
    pool = FairPool(8, limits)
    inside: set[int] = set()
    done: dict[int, list[int]] = defaultdict(list)

    def job(session: int, number: int) -> None:
        assert session not in inside, "another job of the session is running"
        inside.add(session)
        done[session].append(number)
        inside.remove(session)

    def send(session: int) -> None:
        jobs = [
            pool.submit(f"owner {session % 4}", str(session), partial(job, session, i))
            for i in range(REPEATS)
        ]
        for one in jobs:
            one.result(timeout=30)

    together(send)
    pool.close()
    assert done == {session: list(range(REPEATS)) for session in range(THREADS)}
    assert pool.count == 0


def test_a_queue_takes_exactly_what_it_has_room_for(together: Together) -> None:
    room = 50
    for _ in range(REPEATS):
        limits = Limits(queued=room, queued_per_owner=room, queued_per_session=room)
        pool = FairPool(1, limits)
        # the only worker waits until all have asked
        gate = threading.Event()
        pool.submit("owner", "first", partial(gate.wait, 30))

        def send(number: int, pool: FairPool = pool) -> int:
            taken = 0
            for _ in range(5):
                try:
                    pool.submit("owner", str(number), lambda: None)
                except ServiceError:
                    continue
                taken += 1
            return taken

        assert 1 + sum(together(send)) == room  # of 1 + 80
        gate.set()
        pool.close()


def test_no_more_scalars_are_shown_than_there_is_room_for(together: Together) -> None:
    room = 64
    for _ in range(3):
        metrics = ServiceMetrics()

        def observe(number: int, metrics: ServiceMetrics = metrics) -> None:
            names = [SlowName(f"figure_{number}_{i}") for i in range(10)]
            figures: dict[str, float] = dict.fromkeys(names, 0.5)
            logits = torch.zeros(1, 3)
            metrics.observe_health("tent", Prediction(logits, evidence=figures))

        together(observe)  # 160 names
        lines = metrics.render().decode().splitlines()
        shown = [line for line in lines if line.startswith("cliquetta_evidence{")]
        assert len(shown) == room


def test_counters_count_everything(together: Together) -> None:
    metrics = ServiceMetrics()

    def count(_: int) -> None:
        for _ in range(REPEATS):
            metrics.images.labels("predicted").inc(3)

    together(count)
    total = 3 * THREADS * REPEATS
    assert f'images_total{{result="predicted"}} {total}.0' in metrics.render().decode()


@pytest.fixture
def slow_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the sizes of the sessions in memory are added up, other threads run."""
    real_size = vars(Resident)["bytes"].fget

    def slow_size(resident: Resident) -> int:
        time.sleep(0.0005)
        return int(real_size(resident))

    monkeypatch.setattr(Resident, "bytes", property(slow_size))


def test_sessions_in_memory_are_bounded_and_counted_while_all_are_used(
    serve: Serve, together: Together, slow_sizes: None
) -> None:
    """Sixteen sessions of which eight stay in memory: what is read is what was written."""
    request = SessionRequest(classes=CLASSES, method="zero_shot")
    room = 8
    with serve(limits={"resident_sessions": room}) as service:
        sessions = service.service.sessions
        ids = [SlowName(f"session {number}") for number in range(THREADS)]
        for id in ids:
            sessions.create(id, "owner", request)
        states = [sessions.export_state(id) for id in ids]

        def read(number: int) -> list[bytes]:
            return [sessions.export_state(ids[number]) for _ in range(REPEATS // 2)]

        for state, read_states in zip(states, together(read), strict=True):
            for read_state in read_states:
                check_equal(read_state, state)
        assert sessions._busy == set()
        assert len(sessions.residents) == room
        came = THREADS + service.metric("cliquetta_restores_total")
        assert came - service.metric("cliquetta_evictions_total") == room


class WatchedResidents(OrderedDict[str, Resident]):
    """Sessions in memory; notes those that are evicted although they are in use."""

    def __init__(self, sessions: Sessions, on_choice: Callable[[], None]) -> None:
        super().__init__(sessions.residents)
        self._in_use = sessions._busy
        self._on_choice = on_choice
        self.evicted_in_use: list[str] = []

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        self._on_choice()  # it is known now which ones may be evicted

    def pop(self, id: str, *default: Any) -> Any:
        is_eviction = not default
        if is_eviction and id in self._in_use:
            self.evicted_in_use.append(id)
        return super().pop(id, *default)


def test_nobody_begins_to_use_a_session_while_it_is_evicted(serve: Serve) -> None:
    """The first of two goes when the second comes; a reader of the first has to wait."""
    request = SessionRequest(classes=CLASSES, method="zero_shot")
    with serve(limits={"resident_sessions": 1}) as service:
        sessions = service.service.sessions
        sessions.create("first", "owner", request)
        reader = threading.Thread(target=sessions.export_state, args=("first",))

        def begin_to_read() -> None:
            if reader.ident is None:
                reader.start()
            end = time.monotonic() + 0.3
            while time.monotonic() < end and "first" not in sessions._busy:
                time.sleep(0.005)

        watched = WatchedResidents(sessions, on_choice=begin_to_read)
        sessions.residents = watched
        sessions.create("second", "owner", request)
        reader.join(timeout=30)
        assert not reader.is_alive()
        assert watched.evicted_in_use == []


def test_sessions_come_and_go_while_others_are_evicted(
    serve: Serve, together: Together, slow_sizes: None
) -> None:
    """Sixteen clients that make a session and delete it, three times, beside eight others."""
    request = SessionRequest(classes=CLASSES, method="zero_shot")
    with serve(limits={"resident_sessions": 12}) as service:
        sessions = service.service.sessions
        staying = [f"staying {number}" for number in range(8)]
        for id in staying:
            sessions.create(id, "owner", request)

        def come_and_go(number: int) -> None:
            for turn in range(3):
                id = f"{number}-{turn}"
                sessions.create(id, "owner", request)
                sessions.delete(id)

        together(come_and_go)
        assert [info.id for info in sessions.owned_by("owner")] == staying
        assert set(sessions.residents) <= set(staying)


@pytest.mark.slow
def test_racing_clients_of_many_sessions_predict_as_each_method_alone(
    serve: Serve, tiny_clip: CLIP, together: Together
) -> None:
    """Sixteen streams of a method that learns from every batch, three in memory."""
    with serve(limits={"resident_sessions": 3}, workers=4) as service:
        ids = [service.create() for _ in range(THREADS)]

        def stream(number: int) -> list[list[dict[str, float]]]:
            responses = [
                service.predict(ids[number], batch_of(100 * number + turn, 2))
                for turn in range(REPEATS)
            ]
            assert [one["sequence"] for one in responses] == list(range(1, 21))
            return [probabilities(response) for response in responses]

        streams = together(stream)
        for number, predicted in enumerate(streams):
            alone = Alone(tiny_clip)
            batches = [batch_of(100 * number + turn, 2) for turn in range(REPEATS)]
            assert predicted == [alone.predict(batch) for batch in batches]
            service.check_state(ids[number], alone)
        assert service.metric("cliquetta_images_total") == THREADS * REPEATS * 2
        assert service.service.budget.used == 0
