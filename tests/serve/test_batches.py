"""Batches are predicted as the library does; bad images are named and evidence is bounded."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from cliquetta.model.clip import CLIP
from cliquetta.serve.batches import summarise
from tests._helpers.serve_setup import Alone, Local, batch_of, local_service, probabilities
from tests._helpers.tolerance import SUM


def test_top_k_and_labels(service: Local, tiny_clip: CLIP) -> None:
    response = service.send(service.create("zero_shot"), batch_of(1), top_k=2).json()
    expected = Alone(tiny_clip, "zero_shot").predict(batch_of(1))
    for one, row in zip(response["predictions"], expected, strict=True):
        best = sorted(row, key=lambda name: -row[name])
        assert [entry["label"] for entry in one["top"]] == best[:2]
        assert (one["label"], one["probability"]) == tuple(one["top"][0].values())
    assert [one["name"] for one in response["predictions"]] == ["0.png", "1.png", "2.png", "3.png"]


def test_json_and_form_are_the_same_request(service: Local) -> None:
    images = batch_of(2)
    encoded = [
        {"name": f"{i}.png", "data": base64.b64encode(data).decode()}
        for i, data in enumerate(images)
    ]
    session = service.create()
    by_form = service.send(session, images, sequence=1, top_k=3, evidence=True)
    body = {"images": encoded, "sequence": 1, "top_k": 3, "evidence": True}
    by_json = service.http.post(f"/v1/sessions/{session}/batches", json=body)
    assert by_json.content == by_form.content
    assert by_json.headers["Cliquetta-Replayed"] == "true"
    assert isinstance(by_form.json()["evidence"]["loss"], float)


def test_bad_images_are_named_and_the_others_predicted(service: Local, tiny_clip: CLIP) -> None:
    good = batch_of(3, 3)
    images = [good[0], b"not an image", good[1], b"", good[2][:60]]
    response = service.predict(service.create(), images)
    assert [one["index"] for one in response["predictions"]] == [0, 2]
    assert [(bad["index"], bad["name"]) for bad in response["errors"]] == [
        (1, "1.png"),
        (3, "3.png"),
        (4, "4.png"),
    ]
    assert "not an image" in response["errors"][0]["reason"]
    assert "empty" in response["errors"][1]["reason"]
    assert "truncated" in response["errors"][2]["reason"]
    assert probabilities(response) == Alone(tiny_clip).predict(good[:2])


def test_a_batch_without_a_readable_image_teaches_nothing(service: Local, tiny_clip: CLIP) -> None:
    session = service.create()
    response = service.predict(session, [b"x", b"y"])
    assert response["predictions"] == [] and len(response["errors"]) == 2
    again = service.predict(session, batch_of(1))
    assert again["sequence"] == 2
    assert probabilities(again) == Alone(tiny_clip).predict(batch_of(1))


def rejections(response: dict[str, Any]) -> list[tuple[bool, float]]:
    return [(one["rejected"], one["rejection_score"]) for one in response["predictions"]]


def expected(alone: Alone, images: list[bytes]) -> list[tuple[bool, float]]:
    summary = alone.adapter.predict(images).rejection
    assert summary is not None
    return list(zip(summary.rejected.tolist(), summary.score.tolist(), strict=True))


def test_a_session_says_what_the_method_alone_says_also_after_a_restart(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    alone = Alone(tiny_clip)
    alone.adapter.enable_rejection(0.5)
    responses = []
    with local_service(tmp_path, tiny_clip) as service:
        id = service.create(reject=0.5)
        responses += [rejections(service.predict(id, batch_of(seed))) for seed in range(2)]
    with local_service(tmp_path, tiny_clip) as service:
        assert service.http.get(f"/v1/sessions/{id}").json()["reject"] == 0.5
        responses += [rejections(service.predict(id, batch_of(seed))) for seed in range(2, 4)]
    for seed, response in enumerate(responses):
        wanted = expected(alone, batch_of(seed))
        assert [rejected for rejected, _ in response] == [rejected for rejected, _ in wanted]
        assert [score for _, score in response] == pytest.approx([score for _, score in wanted])
    decisions = [rejected for response in responses for rejected, _ in response]
    assert 0 < sum(decisions) < len(decisions)


def test_calibrated_predictions_are_those_of_the_method_alone_also_after_a_restart(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    alone = Alone(tiny_clip)
    alone.adapter.enable_calibration()
    responses, name = [], ""
    for seed in range(3):
        with local_service(tmp_path, tiny_clip) as service:
            name = service.create(calibrate=True) if seed == 0 else name
            responses.append(probabilities(service.predict(name, batch_of(seed))))
    for seed, response in enumerate(responses):
        for summary, wanted in zip(response, alone.predict(batch_of(seed)), strict=True):
            assert summary == pytest.approx(wanted, abs=SUM)


def test_without_rejection_responses_have_no_such_fields(service: Local) -> None:
    id = service.create()
    for one in service.predict(id, batch_of(0))["predictions"]:
        assert list(one) == ["index", "name", "label", "probability", "top"]


def test_evidence_is_json_of_bounded_size() -> None:
    @dataclasses.dataclass
    class Inner:
        weights: torch.Tensor
        label: str

    summary = summarise(
        {
            "small": torch.tensor([[1.0, float("nan")], [2.0, float("inf")]]),
            "large": torch.arange(1000),
            "inner": Inner(torch.tensor(3), "x"),
            "many": tuple(range(1000)),
            "object": object(),
            "deep": [[[[[1]]]]],
        }
    )
    assert summary["small"] == [[1.0, None], [2.0, None]]
    assert summary["large"] == {"shape": [1000], "mean": 499.5, "min": 0.0, "max": 999.0}
    assert summary["inner"] == {"weights": 3, "label": "x"}
    assert summary["many"]["length"] == 1000 and len(summary["many"]["first"]) == 512
    assert summary["object"] == "object"
    assert summary["deep"] == [[["list"]]]
