"""Refusals name the remedy; defects show no trace."""

from typing import Any

import pytest

from cliquetta.methods.tent import Tent
from cliquetta.types import Batch, Prediction
from tests._helpers.serve_setup import Alone, Local, batch_of, refusal


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
        ({"reject": 1.5}, "less than 1"),
        ({"reject": 0}, "greater than 0"),
        ({"reject": 0.5, "classes": ["cat", "dog"]}, "at least three, got 2"),
    ],
)
def test_bad_requests_get_a_remedy(
    service: Local, change: dict[str, Any], words: str
) -> None:
    response = service.post(**change)
    assert response.status_code == 422 and words in response.json()["message"]
    assert service.ids() == []


def test_a_failing_method(
    service: Local, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Tent, batch: Batch) -> Prediction:
        self.memory.reset()
        raise RuntimeError("secret of the implementation")

    session = service.create()
    with monkeypatch.context() as patch:
        patch.setattr(Tent, "_predict", broken)
        failed = service.send(session, batch_of(0))
    assert refusal(failed) == (500, "internal")
    assert "secret" not in failed.text and "Traceback" not in failed.text
    service.check(session, batch_of(0), alone)
