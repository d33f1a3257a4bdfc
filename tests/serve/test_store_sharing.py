"""Replicas on one store: whatever one of them does meanwhile, every batch counts once, in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cliquetta.cli.main import app
from cliquetta.model.clip import CLIP
from cliquetta.serve import changes
from cliquetta.serve.schema import BatchRequest, SessionRequest, Upload
from cliquetta.serve.store import Store
from cliquetta.serve.store_files import _Bucket
from tests._helpers.serve_setup import (
    CLASSES,
    FREE,
    Alone,
    Local,
    batch_of,
    local_service,
    probabilities,
)


@pytest.fixture(params=["folder", "memory", "folder, changes", "memory, changes"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that writes sessions whole, or (as for large ones) what changed of them."""
    if "changes" in request.param:
        monkeypatch.setattr(changes, "SMALLEST", 0)
        monkeypatch.setattr(changes, "LONGEST", 2)
    if "folder" in request.param:
        return str(tmp_path)
    lock, create = threading.Lock(), _Bucket.create

    def create_one_by_one(self: _Bucket, name: str, data: bytes) -> None:
        with lock:  # fsspec's memory looks and writes in two steps, buckets in one
            create(self, name, data)

    monkeypatch.setattr(_Bucket, "create", create_one_by_one)
    return f"memory://{tmp_path.name}"


Pair = tuple[Local, Local]


@pytest.fixture
def pair(where: str, tiny_clip: CLIP) -> Iterator[Pair]:
    """Two replicas on one store."""
    with ExitStack() as stack:
        yield tuple(  # type: ignore[misc]
            stack.enter_context(local_service(Store(where), tiny_clip)) for _ in range(2)
        )


def test_any_replica_continues_bit_equally(pair: Pair, tiny_clip: CLIP) -> None:
    first, second = pair
    session, alone = first.create(), Alone(tiny_clip)
    for number in range(6):
        response = pair[number % 2].predict(session, batch_of(number), sequence=number + 1)
        assert probabilities(response) == alone.predict(batch_of(number))
        repeat = pair[(number + 1) % 2].predict(session, batch_of(number), sequence=number + 1)
        assert repeat == response
    first.check_state(session, alone)
    assert first.http.post(f"/v1/sessions/{session}/reset").status_code == 200
    second.check_state(session, Alone(tiny_clip))
    for service in pair:
        (info,) = service.http.get("/v1/sessions").json()["sessions"]
        assert (info["id"], info["sequence"], info["images"]) == (session, 6, 24)
    assert second.http.delete(f"/v1/sessions/{session}").status_code == 204
    for service in pair:
        assert service.send(session, batch_of(0)).status_code == 404
        assert service.http.get(f"/v1/sessions/{session}").status_code == 404
        assert service.http.get("/v1/sessions").json()["sessions"] == []


def test_a_listing_may_miss_what_changes_meanwhile(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is removed before it is reached, and one that is made after its turn."""
    session = pair[0].create()
    for service in pair:
        files: Any = service.service.sessions._store.files
        sizes, missed = files.sizes, iter(range(10**6))

        def listing(under: str = "", sizes: Any = sizes, missed: Any = missed) -> dict[str, int]:
            return {} if under and next(missed) % 2 == 0 else sizes(under)

        monkeypatch.setattr(files, "sizes", listing)
    for number in range(4):
        response = pair[number % 2].send(session, batch_of(number, 1), sequence=number + 1)
        assert response.status_code == 200, response.text


def test_limits_count_the_sessions_of_all_replicas(where: str, tiny_clip: CLIP) -> None:
    limits = replace(FREE, sessions=3)
    with (
        local_service(Store(where), tiny_clip, limits=limits) as first,
        local_service(Store(where), tiny_clip, limits=limits) as second,
    ):
        first.create()
        second.create()
        first.create()
        refused = second.http.post("/v1/sessions", json={"classes": CLASSES, "method": "tent"})
        assert refused.json()["code"] == "too_many_sessions"


def test_ids_of_clients_are_no_paths(pair: Pair) -> None:
    for id in ("..", "%2e%2e%2fetc", "a" * 31, "A" * 32, "0" * 32, "*"):
        assert pair[0].http.get(f"/v1/sessions/{id}/state").status_code == 404


class Slow:
    """Holds a replica up before or after it writes a version, once."""

    def __init__(self, service: Local, *, after: bool = False) -> None:
        files: Any = service.service.sessions._store.files
        self.files, self.create, self.after = files, files.create, after
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.files.create = self.held

    def held(self, name: str, data: bytes) -> None:
        self.files.create = self.create
        if self.after:
            self.create(name, data)
        self.reached.set()
        assert self.go_on.wait(60)
        if not self.after:
            self.create(name, data)


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("sequence", [None, 2])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_slow_replica_changes_nothing_twice(
    pair: Pair, tiny_clip: CLIP, after: bool, sequence: int | None, more: int
) -> None:
    """The router takes a replica for dead and sends the request to the other; both work on it."""
    first, second = pair
    session, alone, key = first.create(), Alone(tiny_clip), "f" * 32
    first.predict(session, batch_of(0), sequence=1)
    alone.predict(batch_of(0))

    def ask(service: Local) -> Any:
        images = [Upload(data=data) for data in batch_of(1)]
        request = BatchRequest(images=images, top_k=len(CLASSES), sequence=sequence)
        return service.service.sessions.predict(session, request, key)

    slow = Slow(first, after=after)
    held = in_thread(lambda: ask(first))
    assert slow.reached.wait(60)
    response, _ = ask(second)
    for number in range(2, 2 + more):
        second.predict(session, batch_of(number))
    slow.go_on.set()
    late, replayed = held.result(60)
    assert late == response
    assert replayed == (not after or more > 0)  # else it was the one that wrote the answer
    for number in range(1, 2 + more):
        alone.predict(batch_of(number))
    first.check_state(session, alone)
    second.check_state(session, alone)
    assert first.http.get(f"/v1/sessions/{session}").json()["sequence"] == 2 + more


@pytest.mark.parametrize("after", [False, True])
def test_a_replica_that_is_far_too_late_says_so(pair: Pair, tiny_clip: CLIP, after: bool) -> None:
    first, second = pair
    session, alone = first.create(), Alone(tiny_clip)
    slow = Slow(first, after=after)
    held = in_thread(lambda: first.send(session, batch_of(0)))
    assert slow.reached.wait(60)
    if after:
        alone.predict(batch_of(0))
    for number in range(1, 7):
        second.predict(session, batch_of(number))
        alone.predict(batch_of(number))
    slow.go_on.set()
    refused = held.result(60)
    assert (refused.status_code, refused.json()["code"]) == (503, "session_moved")
    assert "retry-after" in refused.headers
    first.check_state(session, alone)


def test_a_deleted_session_stays_deleted(pair: Pair, where: str) -> None:
    first, second = pair
    session = first.create()
    first.predict(session, batch_of(0))
    slow = Slow(first)
    held = in_thread(lambda: first.send(session, batch_of(1)))
    assert slow.reached.wait(60)
    assert second.http.delete(f"/v1/sessions/{session}").status_code == 204
    slow.go_on.set()
    assert held.result(60).status_code == 404
    assert Store(where).find(session) is None


def test_tombstones_are_removed_after_a_day(tmp_path: Path, tiny_clip: CLIP) -> None:
    with local_service(Store(tmp_path), tiny_clip) as service:
        session, other = service.create(), service.create()
        service.http.delete(f"/v1/sessions/{session}")
        (tombstone,) = (tmp_path / session).iterdir()
        service.service.sweep()
        assert tombstone.exists() and tombstone.stat().st_size == 0
        then = time.time() - 2 * 86400
        for path in tmp_path.glob("*/*"):
            os.utime(path, (then, then))
        service.service.sweep()
        assert not (tmp_path / session).exists()
        assert service.send(other, batch_of(0)).status_code == 200


def test_both_replicas_at_once_with_every_batch(pair: Pair, tiny_clip: CLIP) -> None:
    clients = [(pair[number % 2].create(), number) for number in range(3)]

    def stream(session: str, seed: int) -> list[dict[str, Any]]:
        responses = []
        with ThreadPoolExecutor(2) as pool:
            for number in range(8):
                batch = batch_of(100 * seed + number, 2)
                both = [
                    pool.submit(each.predict, session, batch, sequence=number + 1) for each in pair
                ]
                one, other = (future.result(60) for future in both)
                assert one == other
                responses.append(one)
        return responses

    with ThreadPoolExecutor(len(clients)) as pool:
        streams = list(pool.map(lambda client: stream(*client), clients))
    for (session, seed), responses in zip(clients, streams, strict=True):
        alone = Alone(tiny_clip)
        for number, response in enumerate(responses):
            assert probabilities(response) == alone.predict(batch_of(100 * seed + number, 2))
        pair[0].check_state(session, alone)
    # versions are not kept: the present one of each session, and those that it needs
    store, most = pair[0].service.sessions._store, 3 if changes.SMALLEST == 0 else 1
    assert len(clients) <= len(store.files.sizes()) <= most * len(clients)


def test_a_session_is_made_once_for_one_key(pair: Pair) -> None:
    request, key = SessionRequest(classes=CLASSES, method="tent"), "0123456789abcdef" * 2
    made = [one.service.sessions.create(key, "local", request) for one in pair]
    assert made[0] == made[1] and made[0].id == key
    assert len(pair[1].http.get("/v1/sessions").json()["sessions"]) == 1
    slow = Slow(pair[0])
    other = key[::-1]
    held = in_thread(lambda: pair[0].service.sessions.create(other, "local", request))
    assert slow.reached.wait(60)
    late = pair[1].service.sessions.create(other, "local", request)
    slow.go_on.set()
    assert held.result(60) == late


def test_operators_delete_what_replicas_have_in_memory(pair: Pair, where: str) -> None:
    session, other = pair[0].create(), pair[1].create()
    pair[1].predict(session, batch_of(0))
    words = ["sessions", "delete", session, "--state-dir", where]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert [one.send(session, batch_of(1)).status_code for one in pair] == [404, 404]
    assert pair[0].send(other, batch_of(1)).status_code == 200


def test_another_class_list_reaches_all_replicas(pair: Pair) -> None:
    first, second = pair
    session, other = first.create(), ["zebra", "cat", "yacht"]
    second.predict(session, batch_of(0))  # it has the session in memory with the old classes
    path = f"/v1/sessions/{session}/classes"
    assert first.http.put(path, json={"classes": other}).status_code == 200
    response = second.predict(session, batch_of(1))
    assert {one["label"] for one in response["predictions"][0]["top"]} == set(other)
    for service in pair:
        assert service.http.get(f"/v1/sessions/{session}").json()["classes"] == other
    assert first.predict(session, batch_of(1), sequence=2) == response
