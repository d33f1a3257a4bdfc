"""Another class list for a session: durable, in order, and nothing learned is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from cliquetta.model.clip import CLIP
from cliquetta.serve.client import Client, RemoteError
from tests._helpers.serve_setup import CLASSES, Local, batch_of, live_service, local_service

OTHERS = ["cat", "horse", "truck"]
LEARNS = "domain_norm"


def memory(service: Local, id: str) -> dict[str, torch.Tensor]:
    resident = service.service.sessions.residents[id]
    return resident.adapter.state_dict()


def exported(service: Local, id: str) -> dict[str, list[Any]]:
    content = service.http.get(f"/v1/sessions/{id}/state").content
    return {name: value.tolist() for name, value in load(content).items()}


def put(service: Local, id: str, classes: list[str], **more: Any) -> Any:
    return service.http.put(f"/v1/sessions/{id}/classes", json={"classes": classes, **more})


def test_what_was_learned_is_kept_bit_for_bit(service: Local) -> None:
    id = service.create(LEARNS, options={"step_every": 4})
    for seed in range(3):
        service.predict(id, batch_of(seed))
    before = memory(service, id)
    answer = put(service, id, OTHERS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["classes"] == OTHERS and answer.json()["sequence"] == 3
    after = memory(service, id)
    domain = "domains.0"
    for name in before:
        if name.split(".")[0] != "domains" or name.split(".")[2] in ("norms", "key", "progress"):
            assert torch.equal(after[name], before[name]), name
    assert before[f"{domain}.norms.steps"] > 0 and before[f"{domain}.counts.images"] > 0
    assert after[f"{domain}.counts.images"] == 0
    assert after[f"{domain}.counts.marginal"].shape == (len(OTHERS),)
    said = service.predict(id, batch_of(4))
    assert said["sequence"] == 4
    labels = {row["label"] for entry in said["predictions"] for row in entry["top"]}
    assert labels == set(OTHERS)


def test_a_change_is_durable_and_old_answers_stay(tmp_path: Path, tiny_clip: CLIP) -> None:
    with local_service(tmp_path, tiny_clip) as first:
        id = first.create("tent")
        old = first.predict(id, batch_of(0), sequence=1)
        assert put(first, id, OTHERS, templates=["a {}"]).status_code == 200
        norms = memory(first, id)["norms.values"]
    with local_service(tmp_path, tiny_clip) as second:  # as after a kill: from disk
        info = second.http.get(f"/v1/sessions/{id}").json()
        assert info["classes"] == OTHERS and info["templates"] == ["a {}"]
        assert second.predict(id, batch_of(0), sequence=1) == old
        assert torch.equal(memory(second, id)["norms.values"], norms)
        new = second.predict(id, batch_of(1), sequence=2)
        assert {entry["label"] for entry in new["predictions"]} <= set(OTHERS)


def test_refusals_leave_the_session_as_it_was(service: Local) -> None:
    id = service.create("tda")
    service.predict(id, batch_of(0))
    before = exported(service, id)
    for classes, sentence in (
        (OTHERS, "learns about its classes only"),
        (["cat", "cat"], "must differ"),
    ):
        answer = put(service, id, classes)
        assert answer.status_code == 422 and sentence in answer.json()["message"]
    domain = service.create(LEARNS)
    assert "at least two" in put(service, domain, ["cat"]).json()["message"]
    assert put(service, domain, []).status_code == 422
    assert put(service, domain, [f"class {i}" for i in range(10**4)]).status_code == 413
    assert put(service, "0" * 32, OTHERS).status_code == 404
    assert exported(service, id) == before
    assert service.http.get(f"/v1/sessions/{domain}").json()["classes"] == CLASSES


def test_a_disk_that_fails_changes_nothing(service: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    id = service.create(LEARNS)
    service.predict(id, batch_of(0))

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cliquetta.serve.store_files.create_atomically", full)
        assert put(service, id, OTHERS).status_code == 503
    assert service.http.get(f"/v1/sessions/{id}").json()["classes"] == CLASSES
    labels = {entry["label"] for entry in service.predict(id, batch_of(1))["predictions"]}
    assert labels <= set(CLASSES)


def test_the_same_list_changes_nothing(service: Local) -> None:
    id = service.create("tda")
    service.predict(id, batch_of(0))
    before = exported(service, id)
    assert put(service, id, CLASSES).status_code == 200
    assert exported(service, id) == before


def test_changes_take_their_turn_among_batches(service: Local) -> None:
    """Of many requests at once, every answer is of one list, and the numbers have no gap."""
    id = service.create("tent")
    answers: list[dict[str, Any]] = []
    lists = [CLASSES, OTHERS]

    def send(seed: int) -> None:
        answers.append(service.predict(id, batch_of(seed, 2)))

    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    threads += [threading.Thread(target=put, args=(service, id, lists[i % 2])) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["sequence"] for answer in answers) == list(range(1, 5))
    for answer in answers:
        shown = {frozenset(row["label"] for row in e["top"]) for e in answer["predictions"]}
        assert shown in ({frozenset(CLASSES)}, {frozenset(OTHERS)})


def test_the_client_changes_classes(tmp_path: Path, tiny_clip: CLIP) -> None:
    with live_service(tmp_path, tiny_clip) as url, Client(url) as client:
        session = client.create_session(CLASSES, method=LEARNS)
        session.predict(batch_of(0))
        session.set_classes(OTHERS)
        assert session.classes == tuple(OTHERS)
        assert session.predict(batch_of(1)).predictions[0].label in OTHERS
        other = client.create_session(CLASSES, method="tda")
        with pytest.raises(RemoteError, match="learns about its classes only"):
            other.set_classes(OTHERS)
        assert other.classes == tuple(CLASSES)
