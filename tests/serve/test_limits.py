"""Limits of sessions, batches and rates hold before anything large is allocated."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import httpx
import pytest

from cliquetta.model.clip import CLIP
from cliquetta.serve.auth import Tokens
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.limits import RateLimiter
from cliquetta.serve.settings import Limits
from tests._helpers.serve_setup import (
    ALICE,
    BOB,
    CLASSES,
    MANY,
    Local,
    batch_of,
    bearer,
    local_service,
    picture,
)


@pytest.mark.parametrize(
    ("limits", "request_", "words"),
    [
        ({"classes": 4}, {"classes": CLASSES}, "at most 4"),
        ({"class_length": 7}, {"classes": CLASSES}, "7 characters"),
        ({"templates": 1}, {"classes": ["a"], "templates": ["{}", "a {}"]}, "at most 1"),
        ({"state_bytes": 100}, {"classes": CLASSES}, "would remember"),
    ],
)
def test_limits_of_sessions(
    tmp_path: Path, tiny_clip: CLIP, limits: dict[str, Any], request_: dict[str, Any], words: str
) -> None:
    with local_service(tmp_path, tiny_clip, limits=Limits(**limits, **MANY)) as service:
        refused = service.http.post("/v1/sessions", json={**request_, "method": "tent"})
        assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
        assert words in refused.json()["message"]
        assert list(tmp_path.glob("*/*.safetensors")) == []


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("tda", {"positive_capacity": 3_000_000}),
        ("tda", {"negative_capacity": 3_000_000}),
        ("dmn", {"capacity": 3_000_000}),
        ("scap", {"capacity": 3_000_000}),
    ],
)
def test_memory_is_counted_before_it_is_allocated(
    service: Local, method: str, options: dict[str, int]
) -> None:
    service.create(method)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    request = {"classes": CLASSES, "method": method, "options": options}
    refused = service.http.post("/v1/sessions", json=request)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB, of 2 GB


def test_number_of_sessions(tmp_path: Path, tiny_clip: CLIP) -> None:
    limits = Limits(sessions=3, sessions_per_owner=2, **MANY)
    tokens = Tokens([ALICE, BOB])
    with local_service(tmp_path, tiny_clip, limits=limits, tokens=tokens, hosts=None) as service:
        request = {"classes": CLASSES, "method": "zero_shot"}

        def create(token: str) -> httpx.Response:
            return service.http.post("/v1/sessions", json=request, headers=bearer(token))  # type: ignore[return-value]

        first = create(ALICE).json()["id"]
        assert create(ALICE).status_code == 201
        assert create(ALICE).json()["code"] == "too_many_sessions"
        assert create(BOB).status_code == 201
        assert create(BOB).status_code == 429
        service.http.delete(f"/v1/sessions/{first}", headers=bearer(ALICE))
        assert create(BOB).status_code == 201


def test_limits_of_a_batch(tmp_path: Path, tiny_clip: CLIP) -> None:
    limits = Limits(images=3, image_pixels=40 * 40, view_bytes=200_000, **MANY)
    with local_service(tmp_path, tiny_clip, limits=limits) as service:
        session = service.create()
        for count in (4, 9):
            refused = service.send(session, batch_of(0, count))
            assert refused.status_code == 413 and "more than 3 images" in refused.json()["message"]
        response = service.predict(session, [picture(1, size=40), picture(1, size=41)])
        assert [one["index"] for one in response["predictions"]] == [0]
        assert "41 x 41" in response["errors"][0]["reason"]
        views = service.create("mta", options={"views": 10})
        assert service.send(views, batch_of(0, 1)).status_code == 200
        refused = service.send(views, batch_of(0, 2))
        assert refused.status_code == 413 and "send fewer images" in refused.json()["message"]


def test_rate_limit_refills_with_time() -> None:
    now = 0.0
    limiter = RateLimiter(rate=2.0, burst=3, clients=2, clock=lambda: now)
    for _ in range(3):
        limiter.take("a")
    with pytest.raises(ServiceError) as refused:
        limiter.take("a")
    assert (refused.value.status_code, refused.value.headers) == (429, {"Retry-After": "1"})
    limiter.take("b")
    now = 0.5
    limiter.take("a")
    with pytest.raises(ServiceError):
        limiter.take("a")
