"""Sessions in either database: damage is noticed, and replicas count every batch once, in order."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP
from cliquetta.serve.pieces import DamagedError, SavedMemory
from cliquetta.serve.schema import SessionInfo, SessionRequest
from cliquetta.serve.session_store import (
    ExistsError,
    OvertakenError,
    SessionStore,
    StoredResponse,
    StoredSession,
)
from tests._helpers.running import Run
from tests._helpers.serve_setup import (
    CLASSES,
    Alone,
    Local,
    batch_of,
    change_row,
    local_service,
    probabilities,
    refusal,
)
from tests.serve.conftest import Serve

Pair = tuple[Local, Local]


@pytest.fixture
def pair(where: str, tiny_clip: CLIP) -> Iterator[Pair]:
    """Two replicas on one database."""
    with local_service(where, tiny_clip) as one, local_service(where, tiny_clip) as two:
        yield one, two


@pytest.fixture
def store(where: str) -> Iterator[SessionStore]:
    with SessionStore.open(where) as opened:
        yield opened


def new_session(number: int = 0, owner: str = "o") -> StoredSession:
    info = SessionInfo(
        id=f"{number:032x}",
        classes=CLASSES,
        templates=["a {}"],
        model="m",
        method="tent",
        preset=None,
        config={},
        seed=0,
        created=f"2026-01-{number + 1:02}",
        sequence=0,
        images=0,
    )
    return StoredSession(info, owner, "{}")


def flip(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one bit changed."""
    damaged = bytearray(data)
    damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["pieces", "responses", "sessions"])
def test_every_flipped_bit_is_noticed(serve: Serve, where: str, table: str) -> None:
    with serve() as service:
        session = service.create()
        service.predict(session, batch_of(0), sequence=1)
    draw = random.Random(0)
    column = {"pieces": "data", "responses": "body", "sessions": "root"}[table]
    key = "id" if table == "sessions" else "session"
    order = ", number" if table == "pieces" else ""
    with SessionStore.open(where) as store, store.database.reading() as connection:
        query = f"SELECT {column} FROM {table} WHERE {key} = '{session}' ORDER BY {key}{order}"
        intact = bytes(connection.exec_driver_sql(query).scalars().first() or b"")
    if table == "pieces":
        chosen = f"{key} = :id AND {column} = :old"
    else:
        chosen = f"{key} = :id OR {column} = :old"
    statement = f"UPDATE {table} SET {column} = :new WHERE {chosen}"
    for _ in range(4):
        damaged = flip(intact, draw)
        change_row(where, statement, new=damaged, old=intact, id=session)
        with serve() as service:
            # a repeat reads the response, a new batch the memory
            sequence = 1 if table == "responses" else 2
            refused = service.send(
                session, batch_of(0), sequence=sequence, top_k=len(CLASSES)
            )
            assert refusal(refused) == (409, "damaged"), refused.text
            assert "checksum" in refused.json()["message"]
        change_row(where, statement, new=intact, old=damaged, id=session)
    with serve() as service:
        service.predict(session, batch_of(1), sequence=2)


@pytest.mark.parametrize(
    "change",
    [
        "sequence = sequence + 1",
        "images = images + 1",
        "owner = 'another'",
        "info = replace(info, 'cat', 'bat')",
        "adapter = replace(adapter, 'tiny', 'tidy')",
        "imported = NOT imported",
    ],
)
def test_every_changed_column_is_noticed(serve: Serve, where: str, change: str) -> None:
    with serve() as service:
        session = service.create()
        change_row(where, f"UPDATE sessions SET {change}, version = version + 1")
        refused = service.send(session, batch_of(0))
        assert refusal(refused) in {
            (409, "damaged"),
            (404, "not_found"),
        }  # of another owner


def test_missing_and_swapped_pieces(serve: Serve, where: str) -> None:
    with serve() as service:
        one, other, third = (service.create() for _ in range(3))
        for number, session in enumerate((one, other, third)):
            service.predict(session, batch_of(number))
    tensor = "norms.values"
    first = "(SELECT data FROM pieces WHERE session = :other AND tensor = :t AND number = 0)"
    swap = f"UPDATE pieces SET data = {first} WHERE session = :id AND tensor = :t AND number = 0"
    change_row(where, swap, id=one, other=other, t=tensor)
    gone = "DELETE FROM pieces WHERE session = :id AND tensor = :t AND number = 0"
    change_row(where, gone, id=other, t=tensor)
    with serve() as service:
        assert refusal(service.send(one, batch_of(3))) == (409, "damaged")
        missing = service.send(other, batch_of(3))
        assert (
            refusal(missing) == (409, "damaged") and "gone" in missing.json()["message"]
        )
        assert service.send(third, batch_of(3)).status_code == 200


# --- one transaction per batch ----------------------------------------------------------------


def test_a_version_is_written_once(store: SessionStore) -> None:
    memory = {"a": torch.zeros(3, 512)}
    saved, changed = SavedMemory.of("0" * 32, memory)
    first = store.insert(new_session(), saved, changed)
    with pytest.raises(ExistsError):
        store.insert(new_session(), saved, changed)
    memory["a"] = memory["a"] + 1
    changed = saved.update(memory)
    second = store.update(
        first, saved, changed, response=StoredResponse.of(1, "x", b"1"), replay=2
    )
    assert second.version == first.version + 1 == store.version_of(first.info.id)
    with pytest.raises(OvertakenError):
        response = StoredResponse.of(9, "y", b"2")
        store.update(first, saved, changed, response=response, replay=2)
    assert store.response(first.info.id, 9) is None
    found = store.load(first.info.id)
    assert found is not None and found[1].tensors["a"].equal(memory["a"])
    assert store.delete(first.info.id) and not store.delete(first.info.id)
    with pytest.raises(OvertakenError):
        store.update(second, saved, changed)
    again = store.insert(new_session(), saved, [])
    assert again.version > second.version  # nobody takes it for the one before


def test_responses_beyond_the_last_are_removed(store: SessionStore) -> None:
    saved, changed = SavedMemory.of("0" * 32, {})
    stored = store.insert(new_session(), saved, changed)
    for number in range(1, 7):
        response = StoredResponse.of(number, f"digest{number}", b"body")
        stored = store.update(stored, saved, [], response=response, replay=3)
    kept = [number for number in range(1, 7) if store.response(stored.info.id, number)]
    assert kept == [4, 5, 6]


def test_sessions_are_counted_while_one_is_made(store: SessionStore) -> None:
    """Of many that are made at once no more come in than fit."""

    def check_room(everybody: int, owned: int) -> None:
        if everybody >= 5 or owned >= 3:
            raise OverflowError

    def make(number: int) -> bool:
        session = new_session(number, owner="ab"[number % 2])
        saved, changed = SavedMemory.of(session.info.id, {"a": torch.ones(9)})
        try:
            store.insert(session, saved, changed, check_room=check_room)
        except OverflowError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        made = sum(pool.map(make, range(16)))
    assert made == 5 == len(store.find_all())
    assert {len(store.find_all("a")), len(store.find_all("b"))} == {2, 3}


def race(where: str, times: int) -> None:
    """Let two replicas write the same version of a session at once, again and again."""
    info = new_session().info
    with SessionStore.open(where) as one, SessionStore.open(where) as two:
        saved, changed = SavedMemory.of(info.id, {"log": torch.zeros(4, 512)})
        one.insert(new_session(), saved, changed)
        barrier = threading.Barrier(2)

        def write(store: SessionStore, mark: float) -> list[int]:
            """Versions that this replica has written; it continues from the other's."""
            won = []
            for _ in range(times):
                found = store.load(info.id)
                assert found is not None
                stored, memory = found
                barrier.wait(60)
                now = {"log": memory.tensors["log"].clone()}
                now["log"][stored.version % 4] += mark
                now["log"][3, 0] += 1  # counts all writes
                with suppress(OvertakenError):
                    won.append(store.update(stored, memory, memory.update(now)).version)
                barrier.wait(60)
            return won

        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(write, (one, two), (1.0, 2.0))
        assert sorted(first + second) == list(
            range(min(first + second), max(first + second) + 1)
        )
        assert len(first) + len(second) == times  # one wins each time
        found = one.load(info.id)
        assert found is not None
        log = found[1].tensors["log"]
        assert float(log[3, 0] - log[3, 1]) == times
        assert float(log[:, 1].sum()) == len(first) + 2 * len(second)


def test_two_replicas_that_write_at_once(where: str) -> None:
    race(where, 40)


@pytest.mark.slow
def test_two_replicas_that_write_at_once_a_thousand_times(where: str) -> None:
    race(where, 1000)


# --- replicas ---------------------------------------------------------------------------------


def test_any_replica_continues_bit_equally(
    pair: Pair, alone: Alone, tiny_clip: CLIP
) -> None:
    first, second = pair
    session = first.create()
    for number in range(6):
        one = pair[number % 2]
        images = batch_of(number)
        response = one.check(session, images, alone, sequence=number + 1)
        repeat = pair[(number + 1) % 2].predict(session, images, sequence=number + 1)
        assert repeat == response
    first.check_state(session, alone)
    path = f"/v1/sessions/{session}"
    state = first.state(session)
    copy = f"/v1/sessions/{second.create()}"  # a state travels between sessions
    assert second.http.put(f"{copy}/state", content=state).status_code == 200
    first.check_state(copy.rpartition("/")[2], alone)
    assert first.http.delete(copy).status_code == 204
    assert second.http.post(f"{path}/reset").status_code == 200
    first.check_state(
        session, Alone(tiny_clip)
    )  # it has forgotten, and goes on counting
    assert second.http.put(f"{path}/state", content=state).status_code == 200
    first.check_state(session, alone)
    for service in pair:
        info = service.info(session)
        assert service.ids() == [session] and (info["sequence"], info["images"]) == (
            6,
            24,
        )
    assert first.http.delete(path).status_code == 204
    for service in pair:
        assert service.send(session, batch_of(0)).status_code == 404
        assert service.http.get(path).status_code == 404
        assert service.ids() == []
        for id in ("..", "%2e%2e%2fetc", "a" * 31, "A" * 32, "0" * 32, "*"):
            assert service.http.get(f"/v1/sessions/{id}/state").status_code == 404


def test_limits_count_the_sessions_of_all_replicas(where: str, tiny_clip: CLIP) -> None:
    limits = {"sessions": 3}
    with (
        local_service(where, tiny_clip, limits=limits) as first,
        local_service(where, tiny_clip, limits=limits) as second,
    ):
        for service in (first, second, first):
            service.create()
        assert refusal(second.post()) == (429, "too_many_sessions")


@contextmanager
def delay(service: Local, work: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Hold a replica's work up, inside the block, before it writes a version."""
    store: Any = service.service.sessions._store
    update = store.update
    reached = threading.Event()
    go_on = threading.Event()

    def wait(*given: Any, **named: Any) -> Any:
        store.update = update
        reached.set()
        assert go_on.wait(60)
        return update(*given, **named)

    store.update = wait
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        assert reached.wait(60)
        try:
            yield future
        finally:
            go_on.set()


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_slow_replica_changes_nothing_twice(
    pair: Pair, alone: Alone, more: int
) -> None:
    """A client gives up on a replica and sends its batch to the other; both work on it."""
    first, second = pair
    session = first.create()
    first.check(session, batch_of(0), alone, sequence=1)

    with delay(first, lambda: first.predict(session, batch_of(1), sequence=2)) as held:
        response = second.check(session, batch_of(1), alone, sequence=2)
        for number in range(2, 2 + more):
            second.check(session, batch_of(number), alone)
    assert held.result(60) == response
    first.check_state(session, alone)
    second.check_state(session, alone)
    assert first.info(session)["sequence"] == 2 + more


def test_a_batch_without_a_number_comes_after_those_that_were_faster(
    pair: Pair, alone: Alone
) -> None:
    first, second = pair
    session = first.create()
    with delay(first, lambda: first.predict(session, batch_of(0))) as held:
        for number in range(1, 7):
            second.check(session, batch_of(number), alone)
    assert held.result(60)["sequence"] == 7
    assert probabilities(held.result(60)) == alone.predict(batch_of(0))
    second.check_state(session, alone)


def test_a_replica_that_is_always_late_says_so(
    pair: Pair, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = pair[0].create()

    def overtaken(*_: Any, **__: Any) -> None:
        raise OvertakenError

    monkeypatch.setattr(pair[0].service.sessions._store, "update", overtaken)
    refused = pair[0].send(session, batch_of(0))
    assert (
        refusal(refused) == (503, "session_moved") and "retry-after" in refused.headers
    )
    pair[1].check(session, batch_of(1), alone)


def test_a_deleted_session_stays_deleted(pair: Pair, store: SessionStore) -> None:
    first, second = pair
    session = first.create()
    first.predict(session, batch_of(0))
    with delay(first, lambda: first.send(session, batch_of(1))) as held:
        assert second.http.delete(f"/v1/sessions/{session}").status_code == 204
    assert held.result(60).status_code == 404
    assert store.find(session) is None


def test_a_session_that_is_made_again_begins_anew(pair: Pair, tiny_clip: CLIP) -> None:
    """With the same id and as many batches, it is not taken for the one in memory elsewhere."""
    first, second = pair
    request = {"classes": CLASSES, "method": "tent"}
    headers = {"Idempotency-Key": "again"}

    def make() -> str:
        return str(
            first.http.post("/v1/sessions", json=request, headers=headers).json()["id"]
        )

    session = make()
    first.predict(session, batch_of(0))
    second.predict(session, batch_of(1))
    first.http.delete(f"/v1/sessions/{session}")
    assert make() == session
    alone = Alone(tiny_clip)
    for number in range(2, 4):
        first.check(session, batch_of(number), alone)
    second.check(session, batch_of(4), alone)


def test_both_replicas_at_once_with_every_batch(pair: Pair, tiny_clip: CLIP) -> None:
    sessions = [pair[number % 2].create() for number in range(3)]

    def batch(seed: int, number: int) -> list[bytes]:
        return batch_of(100 * seed + number, 2)

    def stream(seed: int) -> list[dict[str, Any]]:
        responses = []
        with ThreadPoolExecutor(2) as pool:
            for number in range(8):
                fields = (sessions[seed], batch(seed, number))
                both = [
                    pool.submit(one.predict, *fields, sequence=number + 1)
                    for one in pair
                ]
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


def test_a_session_is_made_once_for_one_key(pair: Pair) -> None:
    request = SessionRequest(classes=CLASSES, method="tent")
    id = "0123456789abcdef" * 2
    made = [one.service.sessions.create(id, "local", request) for one in pair]
    assert made[0] == made[1] and made[0].id == id
    other = id[::-1]
    with ThreadPoolExecutor(2) as pool:
        tasks = [
            pool.submit(one.service.sessions.create, other, "local", request)
            for one in pair
        ]
    assert tasks[0].result() == tasks[1].result()
    assert set(pair[1].ids()) == {id, other}


def test_operators_delete_what_replicas_have_in_memory(
    pair: Pair, where: str, run: Run
) -> None:
    session = pair[0].create()
    other = pair[1].create()
    pair[1].predict(session, batch_of(0))
    assert run("sessions", "delete", session, "--sessions", where).code == 0
    assert [one.send(session, batch_of(1)).status_code for one in pair] == [404, 404]
    assert pair[0].send(other, batch_of(1)).status_code == 200


def test_another_class_list_reaches_all_replicas(pair: Pair) -> None:
    """And what comes back from disk keeps the norms and the old responses."""
    first, second = pair
    session = first.create("domain_norm", options={"window": 4})
    other = ["zebra", "cat", "yacht"]
    name = "memory.domains.0.norms.values"
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


# --- files ------------------------------------------------------------------------------------


def test_an_exported_session_continues_elsewhere(
    serve: Serve, where: str, tmp_path: Path, tiny_clip: CLIP, alone: Alone
) -> None:
    """In another database, with its owner, its number and its last responses."""
    with serve() as service:
        session = service.create()
        service.check(session, batch_of(0), alone, sequence=1)
        repeat = service.check(session, batch_of(1), alone, sequence=2)
    with SessionStore.open(where) as store:
        data = store.export(session)
    elsewhere = tmp_path / "elsewhere"
    with local_service(elsewhere, tiny_clip) as service:
        with SessionStore.open(elsewhere) as store:
            store.import_file(data, "x")
            with pytest.raises(UserError, match="already"):
                store.import_file(data, "x")
        assert service.predict(session, batch_of(1), sequence=2) == repeat
        service.check(session, batch_of(2), alone, sequence=3)
        service.check_state(session, alone)


def test_damaged_files_are_not_imported(store: SessionStore, where: str) -> None:
    memory = {"a": torch.ones(2000), "b": torch.zeros(())}
    saved, changed = SavedMemory.of("0" * 32, memory)
    stored = store.insert(new_session(), saved, changed)
    store.update(
        stored, saved, [], response=StoredResponse.of(1, "digest", b"body"), replay=4
    )
    data = store.export("0" * 32)
    store.delete("0" * 32)
    draw = random.Random(0)
    for _ in range(60):
        with pytest.raises(UserError):  # DamagedError, or a file that cannot be read
            store.import_file(flip(data, draw), "x")
    with pytest.raises(DamagedError):
        store.import_file(data.replace(b"cat", b"bat"), "x")
    assert store.find_all() == []
    assert store.import_file(data, "x").info.id == "0" * 32
