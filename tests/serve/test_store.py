"""Session files: damage is noticed, and replicas on one store count every batch once, in order."""

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from cliquetta.errors import BusyError, UserError
from cliquetta.model.clip import CLIP
from cliquetta.serve import changes
from cliquetta.serve.schema import BatchRequest, SessionRequest, Upload
from cliquetta.serve.store import Store
from cliquetta.serve.store_files import _Bucket
from tests._helpers.running import Run
from tests._helpers.serve_setup import (
    CLASSES,
    Alone,
    Local,
    batch_of,
    last_file,
    local_service,
    probabilities,
    refusal,
)
from tests.serve.conftest import Serve


def test_every_flipped_bit_is_noticed(serve: Serve, tmp_path: Path) -> None:
    with serve() as service:
        session = service.create()
        service.predict(session, batch_of(0))
    path = last_file(tmp_path, session)
    intact = path.read_bytes()
    end = 8 + int.from_bytes(intact[:8], "little")
    draw = random.Random(0)
    indices = [draw.randrange(end, len(intact)) for _ in range(8)]
    indices += [intact.index(b"images", 0, end) + 12, intact.index(b"created", 0, end) + 14]
    files = [intact[:-9]]
    for index in indices:
        damaged = bytearray(intact)  # and nothing is written after it
        damaged[index] ^= 1 << draw.randrange(3)
        files.append(bytes(damaged))
    for data in files:
        path.write_bytes(data)
        with serve() as service:
            refused = service.send(session, batch_of(1))
        if refused.status_code != 404:  # where not even the head can be read
            assert refusal(refused) == (409, "damaged")
            assert len(data) < len(intact) or "checksum" in refused.json()["message"]


def test_misplaced_files(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serve(limits={"resident_sessions": 1}) as service:
        first, second, third = (service.create() for _ in range(3))
        one, other = (last_file(tmp_path, id) for id in (first, second))
        one.rename(tmp_path / "x")
        other.rename(one)
        (tmp_path / "x").rename(other)
        refused = service.send(first, batch_of(0))
        assert refusal(refused) == (409, "damaged")
        assert f"holds session {second}" in refused.json()["message"]
        other.unlink()
        assert "is gone" in service.send(second, batch_of(0)).json()["message"]
        assert service.send(third, batch_of(0)).status_code == 200
    shutil.copytree(tmp_path / third, tmp_path / ("c" * 32))
    with serve() as service:
        assert service.ids() == [third]
    assert "copied or swapped" in caplog.text


def test_a_folder_needs_hard_links_and_has_one_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with Store.open(tmp_path):
        assert not list(tmp_path.glob(".probe*"))
        with pytest.raises(BusyError), Store.open(tmp_path):
            pass
    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(UserError, match="hard links"), Store.open(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_stores_that_cannot_fence_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="ftp://"):
        Store("ftp://host/x")
    with Store.open("memory://probed") as store:
        assert store.scan() == []

    def overwrite(self: _Bucket, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"{self._root}/{name}", data)

    monkeypatch.setattr(_Bucket, "create", overwrite)
    with pytest.raises(UserError, match="only if"), Store.open("memory://y"):
        pass


@pytest.fixture(params=["folder", "memory", "folder, changes", "memory, changes"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store that writes sessions in full, or (as for large ones) what changed of them."""
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
    with (
        local_service(Store(where), tiny_clip) as one,
        local_service(Store(where), tiny_clip) as two,
    ):
        yield one, two


def test_any_replica_continues_bit_equally(pair: Pair, alone: Alone, tiny_clip: CLIP) -> None:
    first, second = pair
    session = first.create()
    for number in range(6):
        one, images = pair[number % 2], batch_of(number)
        response = one.check(session, images, alone, sequence=number + 1)
        repeat = pair[(number + 1) % 2].predict(session, images, sequence=number + 1)
        assert repeat == response
    first.check_state(session, alone)
    path, state = f"/v1/sessions/{session}", first.state(session)
    copy = f"/v1/sessions/{second.create()}"  # a state travels between sessions
    assert second.http.put(f"{copy}/state", content=state).status_code == 200
    first.check_state(copy.rpartition("/")[2], alone)
    assert first.http.delete(copy).status_code == 204
    assert second.http.post(f"{path}/reset").status_code == 200
    first.check_state(session, Alone(tiny_clip))  # it has forgotten, and goes on counting
    assert second.http.put(f"{path}/state", content=state).status_code == 200
    first.check_state(session, alone)
    for service in pair:
        info = service.info(session)
        assert service.ids() == [session] and (info["sequence"], info["images"]) == (6, 24)
    assert first.http.delete(path).status_code == 204
    for service in pair:
        assert service.send(session, batch_of(0)).status_code == 404
        assert service.http.get(path).status_code == 404
        assert service.ids() == []
        for id in ("..", "%2e%2e%2fetc", "a" * 31, "A" * 32, "0" * 32, "*"):  # none is a path
            assert service.http.get(f"/v1/sessions/{id}/state").status_code == 404


def test_a_listing_may_miss_what_changes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
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
    limits = {"sessions": 3}
    with (
        local_service(Store(where), tiny_clip, limits=limits) as first,
        local_service(Store(where), tiny_clip, limits=limits) as second,
    ):
        first.create()
        second.create()
        first.create()
        assert refusal(second.post()) == (429, "too_many_sessions")


@contextmanager
def delay(service: Local, work: Callable[[], Any], *, after: bool = False) -> Iterator[Future[Any]]:
    """Hold a replica's work up, inside the block, before or after it writes a version."""
    files: Any = service.service.sessions._store.files
    create, reached, go_on = files.create, threading.Event(), threading.Event()

    def wait(name: str, data: bytes) -> None:
        files.create = create
        if after:
            create(name, data)
        reached.set()
        assert go_on.wait(60)
        if not after:
            create(name, data)

    files.create = wait
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        assert reached.wait(60)
        try:
            yield future
        finally:
            go_on.set()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("sequence", [None, 2])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_slow_replica_changes_nothing_twice(
    pair: Pair, alone: Alone, after: bool, sequence: int | None, more: int
) -> None:
    """The router believes a replica dead and sends the request to the other; both work on it."""
    first, second = pair
    session, key = first.create(), "f" * 32
    first.check(session, batch_of(0), alone, sequence=1)

    def ask(service: Local) -> Any:
        images = [Upload(data=data) for data in batch_of(1)]
        request = BatchRequest(images=images, top_k=len(CLASSES), sequence=sequence)
        work = partial(service.service.sessions.predict, session, request, key)
        return service.service.attempt(work)

    with delay(first, lambda: ask(first), after=after) as held:
        response, _ = ask(second)
        for number in range(2, 2 + more):
            second.predict(session, batch_of(number))
    late, replayed = held.result(60)
    assert late == response
    assert replayed == (not after or more > 0)  # else it was the one that wrote the response
    for number in range(1, 2 + more):
        alone.predict(batch_of(number))
    first.check_state(session, alone)
    second.check_state(session, alone)
    assert first.info(session)["sequence"] == 2 + more


@pytest.mark.parametrize("after", [False, True])
def test_a_replica_that_is_far_too_late_says_so(pair: Pair, alone: Alone, after: bool) -> None:
    first, second = pair
    session = first.create()
    if after:
        alone.predict(batch_of(0))
    with delay(first, lambda: first.send(session, batch_of(0)), after=after) as held:
        for number in range(1, 7):
            second.check(session, batch_of(number), alone)
    refused = held.result(60)
    assert refusal(refused) == (503, "session_moved")
    assert "retry-after" in refused.headers
    first.check_state(session, alone)


def test_a_deleted_session_stays_deleted(pair: Pair, where: str) -> None:
    first, second = pair
    session = first.create()
    first.predict(session, batch_of(0))
    with delay(first, lambda: first.send(session, batch_of(1))) as held:
        assert second.http.delete(f"/v1/sessions/{session}").status_code == 204
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
    sessions = [pair[number % 2].create() for number in range(3)]

    def batch(seed: int, number: int) -> list[bytes]:
        return batch_of(100 * seed + number, 2)

    def stream(seed: int) -> list[dict[str, Any]]:
        responses = []
        with ThreadPoolExecutor(2) as pool:
            for number in range(8):
                fields = (sessions[seed], batch(seed, number))
                both = [pool.submit(one.predict, *fields, sequence=number + 1) for one in pair]
                one, other = (future.result(60) for future in both)
                assert one == other
                responses.append(one)
        return responses

    with ThreadPoolExecutor(len(sessions)) as pool:
        streams = list(pool.map(stream, range(len(sessions))))
    for seed, responses in enumerate(streams):
        alone = Alone(tiny_clip)
        for number, response in enumerate(responses):
            assert probabilities(response) == alone.predict(batch(seed, number))
        pair[0].check_state(sessions[seed], alone)
    # old versions are removed: the present one of each session, and those that it needs
    store, most = pair[0].service.sessions._store, 3 if changes.SMALLEST == 0 else 1
    assert len(sessions) <= len(store.files.sizes()) <= most * len(sessions)


def test_a_session_is_made_once_for_one_key(pair: Pair) -> None:
    request, key = SessionRequest(classes=CLASSES, method="tent"), "0123456789abcdef" * 2
    made = [one.service.sessions.create(key, "local", request) for one in pair]
    assert made[0] == made[1] and made[0].id == key
    assert pair[1].ids() == [key]
    first, second = (one.service.sessions for one in pair)
    other = key[::-1]
    with delay(pair[0], lambda: first.create(other, "local", request)) as held:
        late = second.create(other, "local", request)
    assert held.result(60) == late


def test_operators_delete_what_replicas_have_in_memory(pair: Pair, where: str, run: Run) -> None:
    session, other = pair[0].create(), pair[1].create()
    pair[1].predict(session, batch_of(0))
    assert run("sessions", "delete", session, "--state-dir", where).code == 0
    assert [one.send(session, batch_of(1)).status_code for one in pair] == [404, 404]
    assert pair[0].send(other, batch_of(1)).status_code == 200


def test_another_class_list_reaches_all_replicas(pair: Pair) -> None:
    """And what comes back from disk keeps the norms and the old responses."""
    first, second = pair
    session = first.create("domain_norm", options={"step_every": 4})
    other, name = ["zebra", "cat", "yacht"], "memory.domains.0.norms.values"
    old = second.predict(session, batch_of(0))
    norms = load(second.state(session))[name]
    request = {"classes": other, "templates": ["a {}"]}
    response = second.http.put(f"/v1/sessions/{session}/classes", json=request)
    assert response.status_code == 200, response.text
    for service in pair:
        assert load(service.state(session))[name].equal(norms)
    assert first.predict(session, batch_of(0), sequence=1) == old
    latest = first.predict(session, batch_of(1))
    assert {one["label"] for one in latest["predictions"][0]["top"]} == set(other)
    for service in pair:
        info = service.info(session)
        assert (info["classes"], info["templates"]) == (other, ["a {}"])
    assert second.predict(session, batch_of(1), sequence=2) == latest
