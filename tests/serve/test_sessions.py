"""Sessions keep apart, keep their order, survive eviction, and take every batch once."""

from __future__ import annotations

import json
import shutil
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from cliquetta.methods.state import load_state
from cliquetta.methods.tent import Tent
from cliquetta.model.clip import CLIP
from cliquetta.serve.settings import Limits
from cliquetta.serve.store import Store
from cliquetta.types import Batch, Prediction
from tests._helpers.serve_setup import (
    CLASSES,
    MANY,
    Alone,
    Local,
    batch_of,
    check_equal,
    full_disk,
    local_service,
    make_older,
    probabilities,
    wait_until,
)


def test_least_recently_used_sessions_leave_and_come_back_unchanged(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    limits = Limits(resident_sessions=2, **MANY)
    with local_service(tmp_path, tiny_clip, limits=limits) as service:
        sessions = [service.create() for _ in range(5)]
        alone = [Alone(tiny_clip) for _ in sessions]
        for turn in range(3):
            for number, (session, reference) in enumerate(zip(sessions, alone, strict=True)):
                images = batch_of(10 * turn + number, 2)
                assert probabilities(service.predict(session, images)) == reference.predict(images)
                assert service.metric("cliquetta_resident_sessions ") <= 2
        assert service.metric("cliquetta_restores_total") >= 12
        assert service.metric("cliquetta_evictions_total") >= 12


def test_eviction_also_bounds_bytes(tmp_path: Path, tiny_clip: CLIP) -> None:
    with local_service(tmp_path, tiny_clip, limits=Limits(resident_bytes=1, **MANY)) as service:
        for _ in range(3):
            service.create()
        assert service.metric("cliquetta_resident_sessions ") == 1


@pytest.mark.parametrize("method", ["tent", "scap"])
def test_interleaved_sessions_equal_each_alone(
    service: Local, tiny_clip: CLIP, method: str
) -> None:
    sessions = [service.create(method) for _ in range(4)]

    def stream(number: int) -> list[Any]:
        responses = [service.predict(sessions[number], batch_of(10 * number + i)) for i in range(4)]
        return [probabilities(response) for response in responses]

    with ThreadPoolExecutor(4) as clients:
        streams = list(clients.map(stream, range(4)))
    for number, responses in enumerate(streams):
        alone = Alone(tiny_clip, method)
        assert responses == [alone.predict(batch_of(10 * number + i)) for i in range(4)]


def test_racing_repeats_are_applied_once(service: Local, tiny_clip: CLIP) -> None:
    session, alone = service.create(), Alone(tiny_clip)
    with ThreadPoolExecutor(4) as clients:
        racing = list(
            clients.map(lambda _: service.send(session, batch_of(0), sequence=1, top_k=5), range(4))
        )
    late = service.send(session, batch_of(0), sequence=1, top_k=5)
    assert {response.content for response in racing} == {late.content}
    assert service.http.get(f"/v1/sessions/{session}").json()["images"] == 4
    assert probabilities(late.json()) == alone.predict(batch_of(0))
    response = service.predict(session, batch_of(1), sequence=2)
    assert probabilities(response) == alone.predict(batch_of(1))


@pytest.mark.parametrize(
    ("sequence", "images", "code"),
    [(8, 7, "out_of_order"), (6, 7, "sequence_used"), (1, 0, "answer_gone")],
)
def test_wrong_numbers_are_refused_and_change_nothing(
    service: Local, tiny_clip: CLIP, sequence: int, images: int, code: str
) -> None:
    session, alone = service.create(), Alone(tiny_clip)
    for number in range(6):
        service.predict(session, batch_of(number, 1), sequence=number + 1)
        alone.predict(batch_of(number, 1))
    refused = service.send(session, batch_of(images, 1), sequence=sequence, top_k=5)
    assert (refused.status_code, refused.json()["code"]) == (409, code)
    response = service.predict(session, batch_of(6), sequence=7)
    assert probabilities(response) == alone.predict(batch_of(6))


def test_a_failing_disk_loses_nothing_and_applies_nothing(service: Local, tiny_clip: CLIP) -> None:
    session, alone = service.create(), Alone(tiny_clip)
    service.predict(session, batch_of(0))
    alone.predict(batch_of(0))
    with full_disk():
        refused = service.send(session, batch_of(1), sequence=2, top_k=5)
    assert (refused.status_code, refused.json()["code"]) == (503, "storage")
    assert "Retry-After" in refused.headers and "space" not in refused.text
    response = service.predict(session, batch_of(1), sequence=2)
    assert probabilities(response) == alone.predict(batch_of(1))


def test_work_beyond_its_time_is_broken_off_and_undone(
    tmp_path: Path, tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = threading.Event()

    def slowly(self: Tent, batch: Batch) -> Prediction:
        while endless.is_set():  # a method that would go on for ever, and has learned already
            self.memory["norms.values"] = self.memory["norms.values"] * 1.001
        return real(self, batch)

    real = Tent._predict
    monkeypatch.setattr(Tent, "_predict", slowly)
    with local_service(tmp_path, tiny_clip, limits=Limits(batch_seconds=1.0, **MANY)) as service:
        session, alone = service.create(), Alone(tiny_clip)
        endless.set()
        refused = service.send(session, batch_of(0), sequence=1, top_k=5)
        assert (refused.status_code, refused.json()["code"]) == (503, "out_of_time")
        endless.clear()
        response = service.predict(session, batch_of(0), sequence=1)
        assert probabilities(response) == alone.predict(batch_of(0))
        assert service.metric("cliquetta_restores_total") == 0  # it was never read back from disk


def test_a_state_of_another_kind_is_refused_and_changes_nothing(
    service: Local, tiny_clip: CLIP
) -> None:
    session, other = service.create(), service.create("zero_shot")
    service.predict(session, batch_of(0))
    before, good = service.state(session), service.state(other)
    header = len(before).to_bytes(8, "little")
    for bad in (good, b"", b"x" * 100, before[:-10], header + before[8:], b"\x80\x04." + before):
        refused = service.http.put(f"/v1/sessions/{session}/state", content=bad)
        assert refused.status_code == 422, refused.text
        assert "/" not in refused.json()["message"]  # no path of the server
    check_equal(service.state(session), before)


def test_sessions_of_a_model_that_is_gone_say_so(tmp_path: Path, tiny_clip: CLIP) -> None:
    from tests._helpers.tiny import build_tiny_clip

    with local_service(tmp_path, tiny_clip) as service:
        session = service.create()
    with local_service(tmp_path, build_tiny_clip(seed=1)) as service:
        refused = service.send(session, batch_of(0))
        assert (refused.status_code, refused.json()["code"]) == (409, "not_served")
    with local_service(tmp_path, tiny_clip) as service:
        assert len(service.predict(session, batch_of(0))["predictions"][0]["top"]) == len(CLASSES)


@pytest.mark.parametrize(
    ("method", "options"), [("zero_shot", {}), ("tent", {}), ("dart", {"views": 4}), ("scap", {})]
)
def test_predictions_are_those_of_the_library(
    service: Local, tiny_clip: CLIP, method: str, options: dict[str, int]
) -> None:
    session, alone = service.create(method, options=options), Alone(tiny_clip, method, **options)
    for number in range(3):
        response = service.predict(session, batch_of(number))
        assert response["sequence"] == number + 1
        assert probabilities(response) == alone.predict(batch_of(number))


def test_state_travels_between_sessions_and_to_the_library(
    service: Local, tiny_clip: CLIP, tmp_path: Path
) -> None:
    source, target = service.create(), service.create()
    for number in range(2):
        service.predict(source, batch_of(number))
    state = service.state(source)
    headers = {"Content-Type": "application/octet-stream"}
    moved = service.http.put(f"/v1/sessions/{target}/state", content=state, headers=headers)
    assert moved.status_code == 200
    (tmp_path / "state.safetensors").write_bytes(state)
    alone = Alone(tiny_clip)
    load_state(alone.adapter, tmp_path / "state.safetensors")
    expected = alone.predict(batch_of(7))
    assert probabilities(service.predict(source, batch_of(7))) == expected
    assert probabilities(service.predict(target, batch_of(7))) == expected
    assert expected != Alone(tiny_clip).predict(batch_of(7))


def test_reset_forgets_and_goes_on_counting(service: Local, tiny_clip: CLIP) -> None:
    session = service.create()
    service.predict(session, batch_of(0))
    info = service.http.post(f"/v1/sessions/{session}/reset").json()
    assert info["sequence"] == 1 and info["images"] == 4
    response = service.predict(session, batch_of(1))
    assert response["sequence"] == 2
    assert probabilities(response) == Alone(tiny_clip).predict(batch_of(1))


def test_sessions_expire_and_those_in_use_do_not(tmp_path: Path, tiny_clip: CLIP) -> None:
    with local_service(tmp_path, tiny_clip) as service:
        old, used, new = (service.create() for _ in range(3))
    make_older(tmp_path, old, 9)
    make_older(tmp_path, used, 6.9)
    with local_service(tmp_path, tiny_clip) as service:  # no --session-days
        assert service.http.get(f"/v1/sessions/{old}").status_code == 200
    with local_service(tmp_path, tiny_clip, session_days=7) as service:
        service.predict(used, batch_of(0))

        def listed() -> set[str]:
            return {info["id"] for info in service.http.get("/v1/sessions").json()["sessions"]}

        wait_until(lambda: listed() == {used, new}, 20)
        service.service.sessions.entries[used].used -= 6.9 * 86400  # it was used just now
        service.service.sweep()
        service.predict(used, batch_of(1))
    sizes = {path.parent.name: path.stat().st_size for path in tmp_path.glob("*/*.safetensors")}
    assert {id for id, size in sizes.items() if size} == {used, new}


def test_a_disk_that_fails_once_does_not_end_the_sweeps(
    tmp_path: Path, tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cliquetta.serve.asgi._SWEEP_SECONDS", 0.02)
    errors, collect = [OSError(5, "Input/output error")] * 2, Store.collect

    def failing(store: Store) -> None:
        if errors:
            raise errors.pop()
        collect(store)

    with local_service(tmp_path, tiny_clip) as service:
        make_older(tmp_path, service.create(), 8)
    monkeypatch.setattr(Store, "collect", failing)
    with local_service(tmp_path, tiny_clip, session_days=7) as service:
        wait_until(lambda: not service.http.get("/v1/sessions").json()["sessions"])


def test_health_tells_a_full_disk(service: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 4096))
        health = service.http.get("/healthz")
        assert health.status_code == 503 and health.json()["code"] == "storage"
        assert "full" in health.json()["message"]
    assert service.http.get("/healthz").status_code == 200
    session = service.create()
    with full_disk():
        assert service.send(session, batch_of(0)).status_code == 503
        assert service.http.get("/healthz").status_code == 503
        assert service.metric("cliquetta_store_errors_total") == 1
    assert service.send(session, batch_of(0)).status_code == 200
    assert service.http.get("/healthz").status_code == 200


@pytest.mark.parametrize("value", ["counter", "header"])
def test_bad_states_are_never_a_server_error(service: Local, value: str) -> None:
    session, fresh = service.create("scap"), service.create("scap")
    service.predict(session, batch_of(0))
    path = f"/v1/sessions/{session}/state"
    state = service.state(session)
    if value == "counter":
        size = int.from_bytes(state[:8], "little")
        metadata = json.loads(state[8 : 8 + size])["__metadata__"]
        tensors = load(state)
        tensors["memory.count"] = torch.full_like(tensors["memory.count"], 2**40)
        state = save(tensors, metadata=metadata)
    else:
        state = state.replace(b'\\"images\\"', b'\\"imag\xff\xfe\\"').replace(
            b"weights", b"weigh\xc3s"
        )
    given = service.http.put(path, content=state)
    assert given.status_code in (200, 422)
    for number in range(3):
        assert service.send(session, batch_of(number)).status_code in (200, 422)
    assert service.http.post(f"/v1/sessions/{session}/reset").status_code == 200
    response = service.predict(session, batch_of(5))
    assert probabilities(response) == probabilities(service.predict(fresh, batch_of(5)))
