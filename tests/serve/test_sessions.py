"""Sessions keep apart, keep their order, survive eviction, and take every batch once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from cliquetta.methods.tent import Tent
from cliquetta.model.clip import CLIP
from cliquetta.serve import store_files
from cliquetta.serve.settings import Limits
from cliquetta.types import Batch, Prediction
from tests._helpers.serve_setup import CLASSES, Alone, Local, batch_of, local_service, probabilities

MANY: dict[str, Any] = {"rate": 1e6, "burst": 10**6}


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
        answers = [service.predict(sessions[number], batch_of(10 * number + i)) for i in range(4)]
        return [probabilities(answer) for answer in answers]

    with ThreadPoolExecutor(4) as clients:
        found = list(clients.map(stream, range(4)))
    for number, answers in enumerate(found):
        alone = Alone(tiny_clip, method)
        assert answers == [alone.predict(batch_of(10 * number + i)) for i in range(4)]


def test_batches_of_one_session_are_taken_one_after_the_other(
    service: Local, tiny_clip: CLIP
) -> None:
    session = service.create()
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda i: service.predict(session, batch_of(i)), range(6)))
    order = sorted(range(6), key=lambda i: answers[i]["sequence"])
    assert sorted(answer["sequence"] for answer in answers) == [1, 2, 3, 4, 5, 6]
    alone = Alone(tiny_clip)
    for i in order:  # whatever the order was, it was one
        assert probabilities(answers[i]) == alone.predict(batch_of(i))


def test_a_repeated_batch_is_applied_once(service: Local, tiny_clip: CLIP) -> None:
    session, alone = service.create(), Alone(tiny_clip)
    first = service.send(session, batch_of(0), sequence=1, top_k=5)
    with ThreadPoolExecutor(4) as clients:
        repeats = list(
            clients.map(lambda _: service.send(session, batch_of(0), sequence=1, top_k=5), range(4))
        )
    assert all(repeat.content == first.content for repeat in repeats)
    alone.predict(batch_of(0))
    answer = service.predict(session, batch_of(1), sequence=2)
    assert probabilities(answer) == alone.predict(batch_of(1))


def test_racing_repeats_are_applied_once(service: Local, tiny_clip: CLIP) -> None:
    session = service.create()
    with ThreadPoolExecutor(4) as clients:
        racing = list(
            clients.map(lambda _: service.send(session, batch_of(0), sequence=1, top_k=5), range(4))
        )
    assert len({answer.content for answer in racing}) == 1
    assert service.http.get(f"/v1/sessions/{session}").json()["images"] == 4
    assert probabilities(racing[0].json()) == Alone(tiny_clip).predict(batch_of(0))


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
    answer = service.predict(session, batch_of(6), sequence=7)
    assert probabilities(answer) == alone.predict(batch_of(6))


def test_a_failing_disk_loses_nothing_and_applies_nothing(
    service: Local, tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, alone = service.create(), Alone(tiny_clip)
    service.predict(session, batch_of(0))
    alone.predict(batch_of(0))

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(store_files, "create_atomically", full)
        refused = service.send(session, batch_of(1), sequence=2, top_k=5)
    assert (refused.status_code, refused.json()["code"]) == (503, "storage")
    assert "Retry-After" in refused.headers and "space" not in refused.text
    answer = service.predict(session, batch_of(1), sequence=2)
    assert probabilities(answer) == alone.predict(batch_of(1))


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
        answer = service.predict(session, batch_of(0), sequence=1)
        assert probabilities(answer) == alone.predict(batch_of(0))
        assert service.metric("cliquetta_restores_total") == 0  # it was never read back from disk


def test_a_failing_method_shows_no_trace_and_is_undone(
    service: Local, tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, alone = service.create(), Alone(tiny_clip)

    def broken(self: Tent, batch: Batch) -> Prediction:
        self.memory.reset()
        raise RuntimeError("secret of the implementation")

    with monkeypatch.context() as patch:
        patch.setattr(Tent, "_predict", broken)
        failed = service.send(session, batch_of(0))
    assert failed.status_code == 500
    assert failed.json()["code"] == "internal"
    assert "secret" not in failed.text and "Traceback" not in failed.text
    assert probabilities(service.predict(session, batch_of(0))) == alone.predict(batch_of(0))


def test_a_state_of_another_kind_is_refused_and_changes_nothing(
    service: Local, tiny_clip: CLIP
) -> None:
    session, other = service.create(), service.create("zero_shot")
    service.predict(session, batch_of(0))
    before = service.http.get(f"/v1/sessions/{session}/state").content
    good = service.http.get(f"/v1/sessions/{other}/state").content
    header = len(before).to_bytes(8, "little")
    for bad in (good, b"", b"x" * 100, before[:-10], header + before[8:], b"\x80\x04." + before):
        refused = service.http.put(f"/v1/sessions/{session}/state", content=bad)
        assert refused.status_code == 422, refused.text
        assert "/" not in refused.json()["message"]  # no path of the server
    after = service.http.get(f"/v1/sessions/{session}/state").content
    assert {k: v.tolist() for k, v in load(after).items()} == {
        k: v.tolist() for k, v in load(before).items()
    }


def test_sessions_of_a_model_that_is_gone_say_so(tmp_path: Path, tiny_clip: CLIP) -> None:
    from tests._helpers.tiny import build_tiny_clip

    with local_service(tmp_path, tiny_clip) as service:
        session = service.create()
    with local_service(tmp_path, build_tiny_clip(seed=1)) as service:
        refused = service.send(session, batch_of(0))
        assert (refused.status_code, refused.json()["code"]) == (409, "not_served")
    with local_service(tmp_path, tiny_clip) as service:
        assert len(service.predict(session, batch_of(0))["predictions"][0]["top"]) == len(CLASSES)


def test_two_servers_do_not_share_a_folder(tmp_path: Path, tiny_clip: CLIP) -> None:
    with (
        local_service(tmp_path, tiny_clip),
        pytest.raises(RuntimeError, match="another process"),
        local_service(tmp_path, tiny_clip),
    ):
        pass
