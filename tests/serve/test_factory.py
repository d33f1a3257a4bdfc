"""Every method can be served; another class list keeps what was learned."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import TypeAdapter

from cliquetta.errors import UserError
from cliquetta.methods.building.registry import method_config
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
    probabilities,
)
from tests.serve.conftest import Serve

METHODS = served_methods()
OTHERS = ["cat", "horse", "truck"]
LEARNS = "domain_norm"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_sessions_of_every_method_go_on_after_a_restart(
    name: str, serve: Serve
) -> None:
    fields = {field.name for field in dataclasses.fields(METHODS[name].config)}
    options = {"views": 3} if "views" in fields else {}
    entry = METHODS[name]
    for preset in (None, *entry.presets):
        plain = resolve_config(entry, preset, {})
        assert TypeAdapter(entry.config).validate_python(plain) == method_config(
            name, preset
        )
    with serve() as service:
        halted, running = (service.create(name, options=options) for _ in range(2))
        first = service.predict(halted, batch_of(0, 2), evidence=True)
        assert probabilities(first) == probabilities(
            service.predict(running, batch_of(0, 2))
        )
        expected = probabilities(service.predict(running, batch_of(1, 2)))
    with serve() as service:
        assert probabilities(service.predict(halted, batch_of(1, 2))) == expected


def test_a_session_with_unknown_settings_is_refused(tiny_clip: CLIP) -> None:
    settings = Settings({"tiny": tiny_clip})
    info, _ = create_session(
        SessionRequest(classes=["cat", "dog"], method="tpt"), settings, "00"
    )
    other = info.model_copy(update={"config": {"momentum": 0.9}})
    with pytest.raises(UserError, match="momentum"):
        build_adapter(other, settings)


def put(service: Local, id: str, classes: list[str], **more: Any) -> Any:
    return service.http.put(
        f"/v1/sessions/{id}/classes", json={"classes": classes, **more}
    )


def labels(response: dict[str, Any]) -> set[str]:
    return {row["label"] for entry in response["predictions"] for row in entry["top"]}


def test_refusals_leave_the_session_as_it_was(service: Local) -> None:
    id = service.create("tda")
    domain = service.create(LEARNS)
    service.predict(id, batch_of(0))
    before = service.state(id)
    assert put(service, id, CLASSES).status_code == 200  # the list that it has
    for session, classes, status, sentence in (
        (id, OTHERS, 422, "learns about its classes only"),
        (id, ["cat", "cat"], 422, "must differ"),
        (domain, ["cat"], 422, "at least two"),
        (domain, [], 422, ""),
        (domain, [f"class {i}" for i in range(10**4)], 413, ""),
        ("0" * 32, OTHERS, 404, ""),
    ):
        response = put(service, session, classes)
        assert response.status_code == status and sentence in response.json()["message"]
    check_equal(service.state(id), before)
    with full_disk(service):
        assert put(service, domain, OTHERS).status_code == 503
    assert service.info(domain)["classes"] == CLASSES
    assert labels(service.predict(domain, batch_of(1))) == set(CLASSES)


def test_changes_take_their_turn_among_batches(service: Local) -> None:
    """Every response of many requests at once is of one list, and their numbers have no gap."""
    id = service.create("tent")
    with ThreadPoolExecutor(7) as clients:
        sent = [
            clients.submit(service.predict, id, batch_of(seed, 2)) for seed in range(4)
        ]
        for names in (CLASSES, OTHERS, CLASSES):
            clients.submit(put, service, id, names)
    responses = [future.result() for future in sent]
    assert sorted(response["sequence"] for response in responses) == list(range(1, 5))
    assert all(
        labels(response) in (set(CLASSES), set(OTHERS)) for response in responses
    )
