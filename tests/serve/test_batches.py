"""Batches are predicted as the library does; bad images, thousands of them, do no harm."""

import base64
import dataclasses
import resource
from typing import Any

import pytest
import torch

from cliquetta.model.clip import CLIP
from cliquetta.serve.batches import check_views, summarise
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.settings import Limits
from tests._helpers.malformed import bombs, malformed
from tests._helpers.serve_setup import (
    CLASSES,
    Alone,
    Local,
    batch_of,
    picture,
    probabilities,
)
from tests._helpers.tolerance import SUM
from tests.serve.conftest import Serve

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:PIL", "ignore::Warning:PIL"
)


def test_top_k_and_labels(service: Local, tiny_clip: CLIP) -> None:
    response = service.send(service.create("zero_shot"), batch_of(1), top_k=2).json()
    expected = Alone(tiny_clip, "zero_shot").predict(batch_of(1))
    for number, (one, row) in enumerate(
        zip(response["predictions"], expected, strict=True)
    ):
        best = sorted(row, key=lambda name: -row[name])
        assert [entry["label"] for entry in one["top"]] == best[:2]
        assert (one["label"], one["probability"]) == tuple(one["top"][0].values())
        assert one["name"] == f"{number}.png"
        assert list(one) == [
            "index",
            "name",
            "label",
            "probability",
            "top",
        ]  # none of rejection


def test_json_and_form_are_the_same_request(service: Local) -> None:
    encoded = [base64.b64encode(data).decode() for data in batch_of(2)]
    images = [{"name": f"{i}.png", "data": data} for i, data in enumerate(encoded)]
    session = service.create()
    fields = {"sequence": 1, "top_k": 3, "evidence": True}
    by_form = service.send(session, batch_of(2), **fields)
    path = f"/v1/sessions/{session}/batches"
    by_json = service.http.post(path, json={"images": images, **fields})
    assert by_json.content == by_form.content
    assert by_json.headers["Cliquetta-Replayed"] == "true"
    assert isinstance(by_form.json()["evidence"]["loss"], float)


def test_bad_images_are_named_and_the_others_predicted(
    service: Local, alone: Alone
) -> None:
    good = batch_of(3, 3)
    images = [good[0], b"not an image", good[1], b"", good[2][:60]]
    response = service.predict(service.create(), images)
    assert [one["index"] for one in response["predictions"]] == [0, 2]
    reasons = {1: "not an image", 3: "empty", 4: "truncated"}
    for bad, (index, reason) in zip(response["errors"], reasons.items(), strict=True):
        assert (bad["index"], bad["name"]) == (index, f"{index}.png") and reason in bad[
            "reason"
        ]
    assert probabilities(response) == alone.predict(good[:2])


def test_a_batch_without_a_readable_image_teaches_nothing(
    service: Local, alone: Alone
) -> None:
    session = service.create()
    response = service.predict(session, [b"x", b"y"])
    assert response["predictions"] == [] and len(response["errors"]) == 2
    assert service.check(session, batch_of(1), alone)["sequence"] == 2


def test_a_session_rejects_and_calibrates_as_the_method_alone(
    serve: Serve, alone: Alone
) -> None:
    alone.adapter.enable(reject=0.5, calibrate=True)
    id = ""
    decisions = list[bool]()
    for seed in range(4):
        with serve() as service:  # as after a restart
            id = id or service.create(reject=0.5, calibrate=True)
            info = service.info(id)
            assert (info["reject"], info["calibrate"]) == (0.5, True)
            response = service.predict(id, batch_of(seed))
        prediction = alone.adapter.predict(batch_of(seed))
        expected = prediction.rejection
        rows = response["predictions"]
        assert expected is not None
        assert [row["rejected"] for row in rows] == expected.rejected.tolist()
        scores = [row["rejection_score"] for row in rows]
        assert scores == pytest.approx(expected.score.tolist())
        decisions += expected.rejected.tolist()
        for row, wanted in zip(
            probabilities(response), prediction.probabilities, strict=True
        ):
            assert [row[name] for name in CLASSES] == pytest.approx(
                wanted.tolist(), abs=SUM
            )
    assert 0 < sum(decisions) < len(decisions)


def peak() -> int:
    """Most memory that this process ever held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_every_malformed_image_gets_a_response(service: Local, tiny_clip: CLIP) -> None:
    session = service.create("zero_shot")
    count = 2400
    size = 100
    service.predict(
        session, [picture(0, format=kind) for kind in ("JPEG", "WEBP", "TIFF")]
    )
    files = malformed(count)  # making the bombs takes memory too
    before = peak()
    refused = 0
    for first in range(0, count, size):
        response = service.predict(session, files[first : first + size])
        indices = [one["index"] for one in response["predictions"]]
        reasons = {bad["index"]: bad["reason"] for bad in response["errors"]}
        assert sorted([*indices, *reasons]) == list(range(size))
        assert all(reason and "0x" not in reason for reason in reasons.values())
        refused += len(reasons)
    assert refused > count / 2  # a flipped bit may leave a picture that can be read
    assert peak() - before < 150_000_000
    service.check(session, batch_of(1), Alone(tiny_clip, "zero_shot"))


@pytest.mark.parametrize("kind", sorted(bombs()))
def test_every_bomb_is_refused_by_name(service: Local, kind: str) -> None:
    response = service.predict(service.create("zero_shot"), [picture(1), bombs()[kind]])
    assert [one["index"] for one in response["predictions"]] == [0]
    reason = response["errors"][0]["reason"]
    words = (
        ("too large",) if "claims" in kind or "holds" in kind else ("scans", "damaged")
    )
    assert any(word in reason for word in words)


def test_evidence_is_json_of_bounded_size() -> None:
    @dataclasses.dataclass
    class Inner:
        weights: torch.Tensor
        label: str

    many: dict[str, Any] = {"length": 1000, "first": list(range(512))}
    for value, expected in (
        (
            torch.tensor([[1.0, float("nan")], [2.0, float("inf")]]),
            [[1.0, None], [2.0, None]],
        ),
        (
            torch.arange(1000),
            {"shape": [1000], "mean": 499.5, "min": 0.0, "max": 999.0},
        ),
        (Inner(torch.tensor(3), "x"), {"weights": 3, "label": "x"}),
        (tuple(range(1000)), many),
        (object(), "object"),
        ([[[[[1]]]]], [[["list"]]]),
    ):
        assert summarise({"name": value}) == {"name": expected}


def test_views_may_fill_the_limit_to_the_last_byte(tiny_clip: CLIP) -> None:
    """Two images in 10 views of 32 x 32 pixels, three floats of four bytes each."""
    needed = 2 * 10 * 32 * 32 * 3 * 4
    adapter = Alone(tiny_clip, "mta", views=10).adapter
    check_views(adapter, 2, Limits(view_bytes=needed))
    with pytest.raises(ServiceError, match="send fewer images"):
        check_views(adapter, 2, Limits(view_bytes=needed - 1))
