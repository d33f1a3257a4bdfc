"""Thousands of damaged images: each is answered, none does harm."""

from __future__ import annotations

import resource
from itertools import islice
from pathlib import Path

import pytest

from cliquetta.model.clip import CLIP
from cliquetta.serve.client import Client
from tests._helpers.malformed import bombs, malformed
from tests._helpers.serve_setup import (
    CLASSES,
    Alone,
    Local,
    batch_of,
    live_service,
    picture,
    probabilities,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::Warning:PIL")

COUNT = 2400

BATCH = 100


def _peak() -> int:
    """Most memory that this process ever held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_every_malformed_image_is_answered(service: Local, tiny_clip: CLIP) -> None:
    session = service.create("zero_shot")
    files = malformed(COUNT)
    service.predict(session, [picture(0, format=kind) for kind in ("JPEG", "WEBP", "TIFF")])
    made = list(files)  # making the bombs takes memory too
    before, reasons, readable = _peak(), 0, 0
    for first in range(0, COUNT, BATCH):
        part = made[first : first + BATCH]
        response = service.predict(session, [data for _, data in part])
        indices = [one["index"] for one in response["predictions"]]
        refused = {bad["index"]: bad["reason"] for bad in response["errors"]}
        assert sorted([*indices, *refused]) == list(range(len(part)))
        assert all(reason and "0x" not in reason for reason in refused.values())
        readable += len(indices)
        reasons += len(refused)
    assert readable + reasons == COUNT
    assert reasons > COUNT / 2  # a flipped bit may leave a picture that can be read
    assert _peak() - before < 150_000_000
    response = service.predict(session, batch_of(1))
    assert probabilities(response) == Alone(tiny_clip, "zero_shot").predict(batch_of(1))


@pytest.mark.parametrize("kind", sorted(bombs()))
def test_every_bomb_is_refused_by_name(service: Local, kind: str) -> None:
    response = service.predict(service.create("zero_shot"), [picture(1), bombs()[kind]])
    assert [one["index"] for one in response["predictions"]] == [0]
    reason = response["errors"][0]["reason"]
    if "claims" in kind or "holds" in kind:
        assert "too large" in reason
    else:
        assert "scans" in reason or "damaged" in reason


def test_a_sample_over_http(tmp_path: Path, tiny_clip: CLIP) -> None:
    with live_service(tmp_path, tiny_clip) as address, Client(address) as client:
        session = client.create_session(CLASSES, method="tent")
        good = batch_of(5)
        for part in range(3):
            files = [data for _, data in islice(malformed(300, seed=part), 250, 300)]
            response = session.predict([*good, *files])
            assert len(response.predictions) + len(response.errors) == 54
            assert [one.index for one in response.predictions][:4] == [0, 1, 2, 3]
        assert client.health().status == "ok"
