"""Sessions that name images of none of the classes: as the method alone, durable, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cliquetta.model.clip import CLIP
from cliquetta.serve.client import Client, RemoteError
from tests._helpers.serve_setup import (
    Alone,
    Local,
    batch_of,
    live_service,
    local_service,
    probabilities,
)
from tests._helpers.tolerance import SUM


def said(answer: dict[str, Any]) -> list[tuple[bool, float]]:
    return [(one["rejected"], one["rejection_score"]) for one in answer["predictions"]]


def expected(alone: Alone, images: list[bytes]) -> list[tuple[bool, float]]:
    found = alone.adapter.predict(images).rejection
    assert found is not None
    return list(zip(found.rejected.tolist(), found.score.tolist(), strict=True))


def test_a_session_says_what_the_method_alone_says_also_after_a_restart(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    alone = Alone(tiny_clip)
    alone.adapter.enable_rejection(0.5)
    answers = []
    with local_service(tmp_path, tiny_clip) as service:
        id = service.create(reject=0.5)
        answers += [said(service.predict(id, batch_of(seed))) for seed in range(2)]
    with local_service(tmp_path, tiny_clip) as service:
        assert service.http.get(f"/v1/sessions/{id}").json()["reject"] == 0.5
        answers += [said(service.predict(id, batch_of(seed))) for seed in range(2, 4)]
    for seed, answer in enumerate(answers):
        wanted = expected(alone, batch_of(seed))
        assert [rejected for rejected, _ in answer] == [rejected for rejected, _ in wanted]
        assert [score for _, score in answer] == pytest.approx([score for _, score in wanted])
    decisions = [rejected for answer in answers for rejected, _ in answer]
    assert 0 < sum(decisions) < len(decisions)


def test_calibrated_answers_are_those_of_the_method_alone_also_after_a_restart(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    alone = Alone(tiny_clip)
    alone.adapter.enable_calibration()
    answers, name = [], ""
    for seed in range(3):
        with local_service(tmp_path, tiny_clip) as service:
            name = service.create(calibrate=True) if seed == 0 else name
            answers.append(probabilities(service.predict(name, batch_of(seed))))
    for seed, answer in enumerate(answers):
        for found, wanted in zip(answer, alone.predict(batch_of(seed)), strict=True):
            assert found == pytest.approx(wanted, abs=SUM)


def test_without_it_answers_have_no_such_fields(service: Local) -> None:
    id = service.create()
    for one in service.predict(id, batch_of(0))["predictions"]:
        assert list(one) == ["index", "name", "label", "probability", "top"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    (
        ({"reject": 1.5}, "less than 1"),
        ({"reject": 0}, "greater than 0"),
        ({"reject": 0.5, "classes": ["cat", "dog"]}, "at least three, got 2"),
    ),
)
def test_what_cannot_be_rejected_is_refused(
    service: Local, changes: dict[str, Any], sentence: str
) -> None:
    request = {"classes": ["cat", "dog", "ship"], "method": "tent", **changes}
    answer = service.http.post("/v1/sessions", json=request)
    assert answer.status_code == 422 and sentence in answer.json()["message"]
    assert service.http.get("/v1/sessions").json()["sessions"] == []


def test_the_client_has_it(tmp_path: Path, tiny_clip: CLIP) -> None:
    with live_service(tmp_path, tiny_clip) as url, Client(url) as client:
        session = client.create_session(["cat", "dog", "ship"], method="zero_shot", reject=0.75)
        first = session.predict(batch_of(0)).predictions[0]
        assert first.rejected in (True, False) and 0 <= (first.rejection_score or 0) <= 1
        plain = client.create_session(["cat", "dog", "ship"], method="zero_shot")
        assert plain.predict(batch_of(0)).predictions[0].rejected is None
        with pytest.raises(RemoteError, match="at least three, got 2"):
            session.set_classes(["cat", "dog"])
