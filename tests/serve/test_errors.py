"""Refusals name the remedy; defects show no trace."""

from __future__ import annotations

from typing import Any

import pytest

from cliquetta.methods.tent import Tent
from cliquetta.model.clip import CLIP
from cliquetta.types import Batch, Prediction
from tests._helpers.serve_setup import CLASSES, Alone, Local, batch_of, probabilities


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "tnet"}, "did you mean 'tent'"),
        ({"model": "/etc/passwd"}, "unknown model of this server"),
        ({"preset": "nope"}, "unknown preset"),
        ({"options": {"learning": 1}}, "did you mean 'lr'"),
        ({"options": {"lr": "fast"}}, "options.lr"),
        ({"options": {"lr": -1}}, "above 0"),
        ({"options": {"betas": [0.9, 0.9, 0.9]}}, "options.betas"),
        ({"classes": ["a", "a"]}, "given twice"),
        ({"classes": ["a", " "]}, "empty"),
        ({"classes": []}, "classes"),
        ({"templates": ["no place"]}, "template"),
        ({"seed": -1}, "seed"),
        ({"path": "x"}, "path"),
    ],
)
def test_bad_requests_are_refused_with_the_remedy(
    service: Local, change: dict[str, Any], words: str
) -> None:
    request = {"classes": CLASSES, "method": "tent", **change}
    response = service.http.post("/v1/sessions", json=request)
    assert response.status_code == 422
    assert words in response.json()["message"]
    assert service.http.get("/v1/sessions").json()["sessions"] == []


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
    response = service.http.post("/v1/sessions", json=request)
    assert response.status_code == 422 and sentence in response.json()["message"]
    assert service.http.get("/v1/sessions").json()["sessions"] == []
