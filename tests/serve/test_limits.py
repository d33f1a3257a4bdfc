"""Limits of sessions, batches and rates hold before anything large is allocated."""

import resource
from pathlib import Path
from typing import Any

import pytest

from cliquetta.serve.errors import ServiceError
from cliquetta.serve.limits import RateLimiter
from tests._helpers.serve_setup import (
    ALICE,
    BOB,
    Local,
    batch_of,
    bearer,
    picture,
    refusal,
)
from tests.serve.conftest import Serve


@pytest.mark.parametrize(
    ("limits", "request_", "words"),
    [
        ({"classes": 4}, {}, "at most 4"),
        ({"class_length": 7}, {}, "7 characters"),
        (
            {"templates": 1},
            {"classes": ["a"], "templates": ["{}", "a {}"]},
            "at most 1",
        ),
        ({"state_bytes": 100}, {}, "would remember"),
    ],
)
def test_limits_of_sessions(
    serve: Serve,
    tmp_path: Path,
    limits: dict[str, int],
    request_: dict[str, Any],
    words: str,
) -> None:
    with serve(limits=limits) as service:
        refused = service.post(**request_)
    assert refusal(refused) == (413, "too_large") and words in refused.json()["message"]
    assert list(tmp_path.glob("*/*.safetensors")) == []


@pytest.mark.parametrize(
    "named",
    ["tda.positive_capacity", "tda.negative_capacity", "dmn.capacity", "scap.capacity"],
)
def test_memory_is_counted_before_it_is_allocated(service: Local, named: str) -> None:
    method, option = named.split(".")
    service.create(method)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refusal(service.post(method, options={option: 3_000_000})) == (
        413,
        "too_large",
    )
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    )  # KiB, of 2 GB


def test_number_of_sessions(serve: Serve) -> None:
    limits = {"sessions": 3, "sessions_per_owner": 2}
    with serve(limits=limits, tokens=[ALICE, BOB]) as service:
        first = service.create(token=ALICE)
        service.create(token=ALICE)
        assert refusal(service.post(token=ALICE)) == (429, "too_many_sessions")
        assert [service.post(token=BOB).status_code for _ in range(2)] == [201, 429]
        service.http.delete(f"/v1/sessions/{first}", headers=bearer(ALICE))
        service.create(token=BOB)


def test_limits_of_a_batch(serve: Serve) -> None:
    with serve(
        limits={"images": 3, "image_pixels": 40 * 40, "view_bytes": 200_000}
    ) as service:
        session = service.create()
        views = service.create("mta", options={"views": 10})
        for id, images, words in (
            (session, batch_of(0, 4), "more than 3 images"),
            (session, batch_of(0, 9), "more than 3 images"),
            (views, batch_of(0, 2), "send fewer images"),
        ):
            refused = service.send(id, images)
            assert refused.status_code == 413 and words in refused.json()["message"]
        assert service.send(views, batch_of(0, 1)).status_code == 200
        response = service.predict(session, [picture(1, size=40), picture(1, size=41)])
        assert [one["index"] for one in response["predictions"]] == [0]
        assert "41 x 41" in response["errors"][0]["reason"]


def test_rate_limit_refills_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("cliquetta.serve.limits.time.monotonic", lambda: now)
    limiter = RateLimiter(rate=2.0, burst=3)
    for _ in range(3):
        limiter.take("a")
    with pytest.raises(ServiceError) as refused:
        limiter.take("a")
    assert (refused.value.status_code, refused.value.headers) == (
        429,
        {"Retry-After": "1"},
    )
    limiter.take("b")
    now = 0.5
    limiter.take("a")
    with pytest.raises(ServiceError):
        limiter.take("a")
