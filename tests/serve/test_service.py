"""The service does what it says, and predicts what the library predicts."""

from __future__ import annotations

import base64
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load

from cliquetta.data.images import ImageError
from cliquetta.errors import UserError
from cliquetta.methods.state import load_state
from cliquetta.model.clip import CLIP
from cliquetta.serve.client import Client, RemoteError, UnreachableError
from cliquetta.serve.settings import Limits
from tests._helpers.serve_setup import (
    CLASSES,
    Alone,
    Local,
    batch_of,
    live_service,
    local_service,
    picture,
    probabilities,
)


@pytest.mark.parametrize(
    ("method", "options"),
    [("zero_shot", {}), ("tent", {}), ("dart", {"views": 4}), ("scap", {})],
)
def test_answers_are_those_of_the_library(
    service: Local, tiny_clip: CLIP, method: str, options: dict[str, int]
) -> None:
    session, alone = service.create(method, options=options), Alone(tiny_clip, method, **options)
    for number in range(3):
        answer = service.predict(session, batch_of(number))
        assert answer["sequence"] == number + 1
        assert probabilities(answer) == alone.predict(batch_of(number))


def test_top_k_and_labels(service: Local, tiny_clip: CLIP) -> None:
    answer = service.send(service.create("zero_shot"), batch_of(1), top_k=2).json()
    expected = Alone(tiny_clip, "zero_shot").predict(batch_of(1))
    for one, row in zip(answer["predictions"], expected, strict=True):
        best = sorted(row, key=lambda name: -row[name])
        assert [entry["label"] for entry in one["top"]] == best[:2]
        assert (one["label"], one["probability"]) == tuple(one["top"][0].values())
    assert [one["name"] for one in answer["predictions"]] == ["0.png", "1.png", "2.png", "3.png"]


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
    answer = service.predict(service.create(), images)
    assert [one["index"] for one in answer["predictions"]] == [0, 2]
    assert [(bad["index"], bad["name"]) for bad in answer["errors"]] == [
        (1, "1.png"),
        (3, "3.png"),
        (4, "4.png"),
    ]
    assert "not an image" in answer["errors"][0]["reason"]
    assert "empty" in answer["errors"][1]["reason"]
    assert "truncated" in answer["errors"][2]["reason"]
    assert probabilities(answer) == Alone(tiny_clip).predict(good[:2])


def test_a_batch_without_a_readable_image_teaches_nothing(service: Local, tiny_clip: CLIP) -> None:
    session = service.create()
    answer = service.predict(session, [b"x", b"y"])
    assert answer["predictions"] == [] and len(answer["errors"]) == 2
    again = service.predict(session, batch_of(1))
    assert again["sequence"] == 2
    assert probabilities(again) == Alone(tiny_clip).predict(batch_of(1))


def test_state_travels_between_sessions_and_to_the_library(
    service: Local, tiny_clip: CLIP, tmp_path: Path
) -> None:
    source, target = service.create(), service.create()
    for number in range(2):
        service.predict(source, batch_of(number))
    state = service.http.get(f"/v1/sessions/{source}/state").content
    headers = {"Content-Type": "application/octet-stream"}
    moved = service.http.put(f"/v1/sessions/{target}/state", content=state, headers=headers)
    assert moved.status_code == 200
    (tmp_path / "state.safetensors").write_bytes(state)
    alone = Alone(tiny_clip)
    load_state(alone.adapter, tmp_path / "state.safetensors")
    expected = alone.predict(batch_of(7))
    assert probabilities(service.predict(source, batch_of(7))) == expected
    assert probabilities(service.predict(target, batch_of(7))) == expected
    assert expected != Alone(tiny_clip).predict(batch_of(7))


def test_reset_forgets_and_goes_on_counting(service: Local, tiny_clip: CLIP) -> None:
    session = service.create()
    service.predict(session, batch_of(0))
    info = service.http.post(f"/v1/sessions/{session}/reset").json()
    assert info["sequence"] == 1 and info["images"] == 4
    answer = service.predict(session, batch_of(1))
    assert answer["sequence"] == 2
    assert probabilities(answer) == Alone(tiny_clip).predict(batch_of(1))


def test_sessions_are_listed_inspected_and_deleted(service: Local) -> None:
    first = service.create("zero_shot", options={"temperature": 2.0}, seed=3)
    second = service.create("tent", templates=["a {}.", "the {}"])
    listed = service.http.get("/v1/sessions").json()["sessions"]
    assert [info["id"] for info in listed] == [first, second]
    info = service.http.get(f"/v1/sessions/{first}").json()
    assert (info["config"], info["seed"]) == ({"temperature": 2.0}, 3)
    assert service.http.delete(f"/v1/sessions/{first}").status_code == 204
    assert service.http.get(f"/v1/sessions/{first}").status_code == 404
    assert service.http.delete(f"/v1/sessions/{first}").status_code == 404
    assert [i["id"] for i in service.http.get("/v1/sessions").json()["sessions"]] == [second]


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
    answer = service.http.post("/v1/sessions", json=request)
    assert answer.status_code == 422
    assert words in answer.json()["message"]
    assert service.http.get("/v1/sessions").json()["sessions"] == []


def test_health_models_methods_and_metrics(service: Local, tiny_clip: CLIP) -> None:
    assert service.http.get("/healthz").json()["status"] == "ok"
    models = service.http.get("/v1/models").json()["models"]
    assert [(m["name"], m["weights"]) for m in models] == [("tiny", tiny_clip.fingerprint)]
    methods = {m["name"]: m for m in service.http.get("/v1/methods").json()["methods"]}
    assert methods["tent"]["config"]["betas"] == [0.9, 0.999]
    session = service.create()
    service.predict(session, [*batch_of(0), b"bad"], sequence=1)
    service.predict(session, [*batch_of(0), b"bad"], sequence=1)
    assert service.metric('cliquetta_images_total{result="predicted"}') == 4
    assert service.metric('cliquetta_images_total{result="refused"}') == 1
    assert service.metric("cliquetta_replays_total") == 1
    assert service.metric("cliquetta_sessions ") == 1


def test_the_python_client(tiny_clip: CLIP, tmp_path: Path) -> None:
    with live_service(tmp_path / "kept", tiny_clip) as address, Client(address) as client:
        session = client.create_session(CLASSES, method="tent")
        (tmp_path / "a.png").write_bytes(picture(1))
        pixels = Image.fromarray(np.zeros((40, 30, 3), np.uint8))
        answer = session.predict([tmp_path / "a.png", picture(2), pixels, b"?"], evidence=True)
        assert [one.name for one in answer.predictions] == ["a.png", "1", "2.png"]
        assert [bad.index for bad in answer.errors] == [3]
        assert answer.evidence is not None and "loss" in answer.evidence
        state = session.export_state()
        session.reset()
        assert load(session.export_state()).keys() == load(state).keys()
        session.import_state(state)
        assert load(session.export_state())["memory.norms.steps"] == 1
        assert [info.id for info in client.sessions()] == [session.id]
        assert client.session(session.id).sequence == session.sequence == 1
        assert client.models()[0].name == "tiny" and client.health().status == "ok"
        assert "zero_shot" in {method.name for method in client.methods()}
        array = np.zeros((40, 30, 3), np.uint8)
        for one in (tmp_path / "a.png", str(tmp_path / "*.png"), array, pixels):
            assert len(session.predict(one).predictions) == 1
        with pytest.raises(RemoteError, match="unknown method"):
            client.create_session(CLASSES, method="nothing")
        session.delete()
        session.delete()
        assert client.sessions() == []


class Flaky:
    """A proxy's answers, one after the other, instead of a server."""

    def __init__(self, *answers: httpx.Response) -> None:
        self.answers = list(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        return self.answers.pop(0)


def test_the_client_waits_for_dates_and_repeats_what_a_proxy_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("cliquetta.serve.client.time.sleep", pauses.append)
    date = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=30), usegmt=True)
    past = "Wed, 21 Oct 2015 07:28:00 GMT"
    flaky = Flaky(
        httpx.Response(503, headers={"Retry-After": date}),
        httpx.Response(503, headers={"Retry-After": past}),
        httpx.Response(429, headers={"Retry-After": "7"}),
        httpx.Response(502, text="<html>"),
        httpx.Response(503, headers={"Retry-After": "0"}),
        httpx.Response(200, json={"sessions": []}),
        httpx.Response(503, headers={"Retry-After": "soon"}),
    )
    client = Client("http://server")
    client._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(flaky))
    assert client.sessions() == []
    assert 25 < pauses[0] <= 30 and pauses[2] == 7
    assert all(0 < pauses[n] < 5 for n in (1, 3, 4))  # a busy server is not asked without a pause
    with pytest.raises(RemoteError, match="503"):
        client.sessions()


def test_the_client_waits_for_a_server_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("cliquetta.serve.client.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "cliquetta.serve.client.time.sleep", lambda s: now.__setitem__(0, now[0] + s)
    )

    def server(request: httpx.Request) -> httpx.Response:
        if now[0] < down:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"sessions": []})

    for seconds, down in ((60.0, 40.0), (30.0, 40.0), (86400.0, 1e6)):
        now[0] = 0.0
        client = Client("http://server", retry_seconds=seconds)
        client._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(server))
        if seconds > down:
            assert client.sessions() == []
        else:
            with pytest.raises(UnreachableError, match=r"http://server.*refused.*retry_seconds"):
                client.sessions()
            assert now[0] <= seconds


def test_a_restart_finds_every_session(tmp_path: Path, tiny_clip: CLIP) -> None:
    alone = Alone(tiny_clip)
    with local_service(tmp_path, tiny_clip) as service:
        session = service.create()
        first = service.predict(session, batch_of(0), sequence=1)
    assert probabilities(first) == alone.predict(batch_of(0))
    with local_service(tmp_path, tiny_clip) as service:
        assert service.http.get(f"/v1/sessions/{session}").json()["sequence"] == 1
        assert service.predict(session, batch_of(0), sequence=1) == first
        second = service.predict(session, batch_of(1), sequence=2)
    assert probabilities(second) == alone.predict(batch_of(1))


def test_a_session_is_made_once_however_often_it_is_asked_for(
    tiny_clip: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cliquetta.serve.client.time.sleep", lambda seconds: None)
    with live_service(tmp_path, tiny_clip) as address, Client(address) as client:
        real, lost = client._http.request, [httpx.ReadTimeout(""), httpx.ReadError("")]

        def request(*words: Any, **content: Any) -> httpx.Response:
            answer = real(*words, **content)
            if lost:
                raise lost.pop()
            return answer

        monkeypatch.setattr(client._http, "request", request)
        made = [client.create_session(CLASSES, method="tent").id for _ in range(2)]
        assert [info.id for info in client.sessions()] == made


def test_the_client_says_what_is_wrong_with_an_address_and_a_token(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="http://127"):
        Client("127.0.0.1:8765")
    with pytest.raises(UserError, match="one line"):
        Client("http://server", "two\nlines")
    lines = Client("http://server", f"{'t' * 20}\n")  # as a file has it
    assert lines._http.headers["Authorization"] == f"Bearer {'t' * 20}"


def test_the_client_has_errors_of_its_own(tmp_path: Path, tiny_clip: CLIP) -> None:
    client, other = Client("http://server"), Flaky(httpx.Response(200, text="<html>"))
    client._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(other))
    with pytest.raises(RemoteError, match="not a response of CliqueTTA"):
        client.health()
    with live_service(tmp_path, tiny_clip, limits=Limits(body_bytes=10**6)) as address:
        session = Client(address, retry_seconds=5).create_session(CLASSES, method="tent")
        with pytest.raises(ImageError, match="no such file"):
            session.predict([tmp_path / "gone.png"])
        with pytest.raises(RemoteError, match="413"):  # although it is refused before it is sent
            session.predict([bytes(30_000_000)])
