"""Sessions keep apart, keep their order, survive eviction, and take every batch once."""

import json
import shutil
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from cliquetta.methods.tent import Tent
from cliquetta.model.clip import CLIP
from cliquetta.serve.database import UnavailableError
from cliquetta.serve.session_store import SessionStore
from cliquetta.types import Batch, Prediction
from tests._helpers.serve_setup import (
    Alone,
    Local,
    batch_of,
    check_equal,
    full_disk,
    local_service,
    make_older,
    probabilities,
    refusal,
    wait_until,
)
from tests._helpers.tiny import build_tiny_clip
from tests.serve.conftest import Serve


@pytest.mark.parametrize("limits", [{"resident_sessions": 2}, {"resident_bytes": 1}])
def test_evicted_sessions_come_back_unchanged(
    serve: Serve, tiny_clip: CLIP, limits: dict[str, int]
) -> None:
    with serve(limits=limits) as service:
        sessions = [(service.create(), Alone(tiny_clip)) for _ in range(5)]
        for turn in range(3):
            for number, (session, alone) in enumerate(sessions):
                service.check(session, batch_of(10 * turn + number, 2), alone)
                most = limits.get("resident_sessions", 1)
                assert service.metric("cliquetta_resident_sessions ") <= most
        assert service.metric("cliquetta_restores_total") >= 12
        assert service.metric("cliquetta_evictions_total") >= 12


@pytest.mark.parametrize(
    ("method", "options"),
    [("zero_shot", {}), ("tent", {}), ("dart", {"views": 4}), ("scap", {})],
)
def test_interleaved_sessions_predict_as_the_library_alone(
    service: Local, tiny_clip: CLIP, method: str, options: dict[str, int]
) -> None:
    sessions = [service.create(method, options=options) for _ in range(4)]
    batches = [[batch_of(10 * number + i) for i in range(4)] for number in range(4)]

    def stream(number: int) -> list[dict[str, Any]]:
        return [service.predict(sessions[number], images) for images in batches[number]]

    with ThreadPoolExecutor(4) as clients:
        streams = list(clients.map(stream, range(4)))
    for responses, given in zip(streams, batches, strict=True):
        alone = Alone(tiny_clip, method, **options)
        assert [response["sequence"] for response in responses] == [1, 2, 3, 4]
        assert [probabilities(one) for one in responses] == [
            alone.predict(part) for part in given
        ]


def test_racing_repeats_are_applied_once(service: Local, alone: Alone) -> None:
    session = service.create()

    def send(_: int = 0) -> Any:
        return service.send(session, batch_of(0), sequence=1, top_k=5)

    with ThreadPoolExecutor(4) as clients:
        racing = list(clients.map(send, range(4)))
    late = send()
    assert {response.content for response in racing} == {late.content}
    assert service.info(session)["images"] == 4
    assert probabilities(late.json()) == alone.predict(batch_of(0))
    service.check(session, batch_of(1), alone, sequence=2)


def test_wrong_numbers_are_refused_and_change_nothing(
    service: Local, alone: Alone
) -> None:
    session = service.create()
    for number in range(1, 7):
        service.check(session, batch_of(number, 1), alone, sequence=number)
    for sequence, code in (
        (8, "out_of_order"),
        (6, "sequence_used"),
        (1, "response_gone"),
    ):
        refused = service.send(session, batch_of(7, 1), sequence=sequence, top_k=5)
        assert refusal(refused) == (409, code)
    service.check(session, batch_of(7), alone, sequence=7)


def test_a_failing_disk_loses_nothing_and_applies_nothing(
    service: Local, alone: Alone
) -> None:
    session = service.create()
    service.check(session, batch_of(0), alone)
    with full_disk(service):
        refused = service.send(session, batch_of(1), sequence=2, top_k=5)
    assert refusal(refused) == (503, "storage")
    assert "Retry-After" in refused.headers and "space" not in refused.text
    service.check(session, batch_of(1), alone, sequence=2)


def test_work_beyond_its_time(
    serve: Serve, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = threading.Event()
    real = Tent._predict

    def slowly(self: Tent, batch: Batch) -> Prediction:
        while (
            endless.is_set()
        ):  # a method that would go on for ever, and has learned already
            self.memory["norms.values"] = self.memory["norms.values"] * 1.001
        return real(self, batch)

    monkeypatch.setattr(Tent, "_predict", slowly)
    with serve(limits={"batch_seconds": 1.0}) as service:
        session = service.create()
        endless.set()
        refused = service.send(session, batch_of(0), sequence=1, top_k=5)
        assert refusal(refused) == (503, "out_of_time")
        endless.clear()
        service.check(session, batch_of(0), alone, sequence=1)
        assert (
            service.metric("cliquetta_restores_total") == 0
        )  # it was never read back from disk


def test_a_state_of_another_kind_is_refused_and_changes_nothing(service: Local) -> None:
    session = service.create()
    other = service.create("zero_shot")
    service.predict(session, batch_of(0))
    before = service.state(session)
    good = service.state(other)
    header = len(before).to_bytes(8, "little")
    for bad in (
        good,
        b"",
        b"x" * 100,
        before[:-10],
        header + before[8:],
        b"\x80\x04." + before,
    ):
        refused = service.http.put(f"/v1/sessions/{session}/state", content=bad)
        assert refused.status_code == 422, refused.text
        assert "/" not in refused.json()["message"]  # no path of the server
    check_equal(service.state(session), before)


def test_sessions_of_a_model_that_is_gone_say_so(serve: Serve, where: str) -> None:
    with serve() as service:
        session = service.create()
    with local_service(where, build_tiny_clip(seed=1)) as service:
        assert refusal(service.send(session, batch_of(0))) == (409, "not_served")
    with serve() as service:
        assert service.send(session, batch_of(0)).status_code == 200


def test_sessions_expire_and_those_in_use_do_not(serve: Serve, where: str) -> None:
    with serve() as service:
        old, used, new = (service.create() for _ in range(3))
    make_older(where, old, 9)
    make_older(where, used, 6.9)
    with serve() as service:  # no --session-days
        assert set(service.ids()) == {old, used, new}
    with serve(session_days=7) as service:
        service.predict(used, batch_of(0))
        wait_until(lambda: set(service.ids()) == {used, new}, 20)
        make_older(where, used, 6.9)
        service.service.sweep()
        service.predict(used, batch_of(1))
        assert set(service.ids()) == {used, new}


def test_sweeps_go_on(
    serve: Serve, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cliquetta.serve.asgi._SWEEP_SECONDS", 0.02)
    errors = [UnavailableError("the database is locked", "wait", 1.0)] * 2
    unused_since = SessionStore.unused_since

    def failing(store: SessionStore, moment: float) -> list[tuple[str, str]]:
        if errors:
            raise errors.pop()
        return unused_since(store, moment)

    with serve() as service:
        session = service.create()
    make_older(where, session, 8)
    monkeypatch.setattr(SessionStore, "unused_since", failing)
    with serve(session_days=7) as service:
        wait_until(lambda: service.ids() == [])
    assert not errors


def test_health_shows_a_disk_with_little_room(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    with serve() as service:
        if service.service.sessions._store.database.file is None:
            pytest.skip("the disk of a database server is not ours to look at")
        monkeypatch.setattr(
            shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 4096)
        )
        full = service.http.get("/healthz")
    assert refusal(full) == (503, "storage") and "full" in full.json()["message"]


def test_health_shows_that_nothing_can_be_saved_until_it_can(service: Local) -> None:
    def health() -> int:
        return service.http.get("/healthz").status_code

    session = service.create()
    assert health() == 200
    with full_disk(service):
        assert service.send(session, batch_of(0)).status_code == 503
        assert health() == 503  # which tries to write by itself
        assert service.metric("cliquetta_store_errors_total") == 2
    assert health() == 200
    assert service.send(session, batch_of(0)).status_code == 200


@pytest.mark.parametrize("value", ["counter", "header"])
def test_bad_states_are_never_a_server_error(service: Local, value: str) -> None:
    session = service.create("scap")
    fresh = service.create("scap")
    service.predict(session, batch_of(0))
    path = f"/v1/sessions/{session}"
    state = service.state(session)
    if value == "counter":
        size = int.from_bytes(state[:8], "little")
        metadata = json.loads(state[8 : 8 + size])["__metadata__"]
        tensors = load(state)
        tensors["memory.count"] = torch.full_like(tensors["memory.count"], 2**40)
        state = save(tensors, metadata=metadata)
    else:
        state = state.replace(b'\\"images\\"', b'\\"imag\xff\xfe\\"')
        state = state.replace(b"weights", b"weigh\xc3s")
    assert service.http.put(f"{path}/state", content=state).status_code in (200, 422)
    for number in range(3):
        assert service.send(session, batch_of(number)).status_code in (200, 422)
    assert service.http.post(f"{path}/reset").status_code == 200
    response = service.predict(session, batch_of(5))
    assert probabilities(response) == probabilities(service.predict(fresh, batch_of(5)))
