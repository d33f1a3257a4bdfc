"""Every method can be served; another class list keeps what was learned."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from cliquetta.errors import UserError
from cliquetta.methods.registry import method_config
from cliquetta.model.clip import CLIP
from cliquetta.serve.factory import build_adapter, create_session, resolve_config
from cliquetta.serve.schema import SessionRequest
from cliquetta.serve.settings import Settings, served_methods
from tests._helpers.serve_setup import (
    CLASSES,
    Local,
    batch_of,
    check_equal,
    full_disk,
    local_service,
    probabilities,
)

METHODS = served_methods()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_configs_come_back_equal(name: str) -> None:
    entry = METHODS[name]
    for preset in (None, *entry.presets):
        plain = resolve_config(entry, preset, {})
        assert TypeAdapter(entry.config).validate_python(plain) == method_config(name, preset)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_sessions_of_every_method_go_on_after_a_restart(
    name: str, tmp_path: Path, tiny_clip: CLIP
) -> None:
    fields = {field.name for field in dataclasses.fields(METHODS[name].config)}
    options = {"views": 3} if "views" in fields else {}
    with local_service(tmp_path, tiny_clip) as service:
        halted, running = (service.create(name, options=options) for _ in range(2))
        first = service.predict(halted, batch_of(0, 2), evidence=True)
        assert probabilities(first) == probabilities(service.predict(running, batch_of(0, 2)))
        expected = probabilities(service.predict(running, batch_of(1, 2)))
    with local_service(tmp_path, tiny_clip) as service:
        assert probabilities(service.predict(halted, batch_of(1, 2))) == expected


def test_a_session_with_unknown_settings_is_refused(tiny_clip: CLIP) -> None:
    settings = Settings({"tiny": tiny_clip})
    info, _ = create_session(SessionRequest(classes=["cat", "dog"], method="tpt"), settings, "00")
    other = info.model_copy(update={"config": {"momentum": 0.9}})
    with pytest.raises(UserError, match="does not know \\(momentum\\)"):
        build_adapter(other, settings)


OTHERS = ["cat", "horse", "truck"]

LEARNS = "domain_norm"


def memory(service: Local, id: str) -> dict[str, torch.Tensor]:
    resident = service.service.sessions.residents[id]
    return resident.adapter.state_dict()


def put(service: Local, id: str, classes: list[str], **more: Any) -> Any:
    return service.http.put(f"/v1/sessions/{id}/classes", json={"classes": classes, **more})


def test_what_was_learned_is_kept_bit_for_bit(service: Local) -> None:
    id = service.create(LEARNS, options={"step_every": 4})
    for seed in range(3):
        service.predict(id, batch_of(seed))
    before = memory(service, id)
    response = put(service, id, OTHERS)
    assert response.status_code == 200, response.text
    assert response.json()["classes"] == OTHERS and response.json()["sequence"] == 3
    after = memory(service, id)
    domain = "domains.0"
    for name in before:
        if name.split(".")[0] != "domains" or name.split(".")[2] in ("norms", "key", "progress"):
            assert torch.equal(after[name], before[name]), name
    assert before[f"{domain}.norms.steps"] > 0 and before[f"{domain}.counts.images"] > 0
    assert after[f"{domain}.counts.images"] == 0
    assert after[f"{domain}.counts.marginal"].shape == (len(OTHERS),)
    latest = service.predict(id, batch_of(4))
    assert latest["sequence"] == 4
    labels = {row["label"] for entry in latest["predictions"] for row in entry["top"]}
    assert labels == set(OTHERS)


def test_a_change_is_durable_and_old_responses_stay(tmp_path: Path, tiny_clip: CLIP) -> None:
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
    before = service.state(id)
    assert put(service, id, CLASSES).status_code == 200  # the list that it has
    for classes, sentence in (
        (OTHERS, "learns about its classes only"),
        (["cat", "cat"], "must differ"),
    ):
        response = put(service, id, classes)
        assert response.status_code == 422 and sentence in response.json()["message"]
    domain = service.create(LEARNS)
    assert "at least two" in put(service, domain, ["cat"]).json()["message"]
    assert put(service, domain, []).status_code == 422
    assert put(service, domain, [f"class {i}" for i in range(10**4)]).status_code == 413
    assert put(service, "0" * 32, OTHERS).status_code == 404
    check_equal(service.state(id), before)
    assert service.http.get(f"/v1/sessions/{domain}").json()["classes"] == CLASSES


def test_a_disk_that_fails_changes_nothing(service: Local) -> None:
    id = service.create(LEARNS)
    service.predict(id, batch_of(0))
    with full_disk():
        assert put(service, id, OTHERS).status_code == 503
    assert service.http.get(f"/v1/sessions/{id}").json()["classes"] == CLASSES
    labels = {entry["label"] for entry in service.predict(id, batch_of(1))["predictions"]}
    assert labels <= set(CLASSES)


def test_changes_take_their_turn_among_batches(service: Local) -> None:
    """Of many requests at once, every answer is of one list, and the numbers have no gap."""
    id = service.create("tent")
    responses: list[dict[str, Any]] = []
    lists = [CLASSES, OTHERS]

    def send(seed: int) -> None:
        responses.append(service.predict(id, batch_of(seed, 2)))

    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    threads += [threading.Thread(target=put, args=(service, id, lists[i % 2])) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(response["sequence"] for response in responses) == list(range(1, 5))
    for response in responses:
        shown = {frozenset(row["label"] for row in e["top"]) for e in response["predictions"]}
        assert shown in ({frozenset(CLASSES)}, {frozenset(OTHERS)})
