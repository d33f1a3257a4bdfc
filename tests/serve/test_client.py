"""The Python client: what it sends, when it repeats, its errors."""

from collections.abc import Iterator
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
from cliquetta.serve.client import Client, RemoteError, UnreachableError
from tests._helpers.serve_setup import CLASSES, batch_of, picture
from tests.serve.conftest import ServeLive


@pytest.fixture
def client(serve_live: ServeLive) -> Iterator[Client]:
    """One that speaks to a service of this machine."""
    with serve_live() as address, Client(address) as client:
        yield client


def test_the_python_client(client: Client, tmp_path: Path) -> None:
    session = client.create_session(CLASSES, method="tent")
    (tmp_path / "a.png").write_bytes(picture(1))
    array = np.zeros((40, 30, 3), np.uint8)
    pixels = Image.fromarray(array)
    response = session.predict(
        [tmp_path / "a.png", picture(2), pixels, b"?"], evidence=True
    )
    assert [one.name for one in response.predictions] == ["a.png", "1", "2.png"]
    assert [bad.index for bad in response.errors] == [3]
    assert response.evidence is not None and "loss" in response.evidence
    state = session.export_state()
    session.reset()
    assert load(session.export_state()).keys() == load(state).keys()
    session.import_state(state)
    assert load(session.export_state())["memory.norms.steps"] == 1
    assert [info.id for info in client.sessions()] == [session.id]
    assert client.session(session.id).sequence == session.sequence == 1
    assert client.models()[0].name == "tiny" and client.health().status == "ok"
    assert "zero_shot" in {method.name for method in client.methods()}
    for one in (tmp_path / "a.png", str(tmp_path / "*.png"), array, pixels):
        assert len(session.predict(one).predictions) == 1
    with pytest.raises(RemoteError, match="method"):
        client.create_session(CLASSES, method="nothing")
    session.delete()
    session.delete()
    assert client.sessions() == []


def test_the_client_rejects_and_changes_classes(client: Client) -> None:
    names = ["cat", "horse", "truck"]
    session = client.create_session(CLASSES, method="domain_norm", reject=0.75)
    first = session.predict(batch_of(0)).predictions[0]
    assert first.rejected in (True, False) and 0 <= (first.rejection_score or 0) <= 1
    session.set_classes(names)
    assert session.classes == tuple(names)
    assert session.predict(batch_of(1)).predictions[0].label in names
    with pytest.raises(RemoteError, match="three"):
        session.set_classes(["cat", "dog"])
    assert session.classes == tuple(names)


@pytest.mark.usefixtures("pauses")
def test_a_session_is_made_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = client._http.request
    lost = [httpx.ReadTimeout(""), httpx.ReadError("")]

    def request(*words: Any, **content: Any) -> httpx.Response:
        response = real(*words, **content)
        if lost:
            raise lost.pop()
        return response

    monkeypatch.setattr(client._http, "request", request)
    made = [client.create_session(CLASSES, method="tent").id for _ in range(2)]
    assert [info.id for info in client.sessions()] == made


def client_of(handler: Any, **options: Any) -> Client:
    """A client whose requests go to a function."""
    client = Client("http://server", **options)
    transport = httpx.MockTransport(handler)
    client._http = httpx.Client(base_url="http://server", transport=transport)
    return client


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client wanted to wait; none of them pass."""
    pauses: list[float] = []
    monkeypatch.setattr("cliquetta.serve.client.time.sleep", pauses.append)
    return pauses


def test_the_client_waits_for_dates_and_repeats_what_a_proxy_lost(
    pauses: list[float],
) -> None:
    date = format_datetime(
        datetime.now(timezone.utc) + timedelta(seconds=30), usegmt=True
    )
    past = "Wed, 21 Oct 2015 07:28:00 GMT"
    done = httpx.Response(200, json={"sessions": []})
    busy = [
        httpx.Response(503, headers={"Retry-After": when}) for when in (date, past, "7")
    ]
    busy += [
        httpx.Response(502, text="<html>"),
        httpx.Response(503, headers={"Retry-After": "0"}),
    ]
    responses = iter(
        [*busy, done, httpx.Response(503, headers={"Retry-After": "soon"})]
    )
    client = client_of(lambda request: next(responses))
    assert client.sessions() == []
    assert 25 < pauses[0] <= 30 and pauses[2] == 7
    assert all(
        0 < pauses[n] < 5 for n in (1, 3, 4)
    )  # a busy server is not asked without a pause
    with pytest.raises(RemoteError, match="503"):
        client.sessions()


@pytest.mark.parametrize(
    ("patience", "down"), [(60.0, 40.0), (30.0, 40.0), (86400.0, 1e6)]
)
def test_the_client_waits_for_a_server_that_restarts(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], patience: float, down: float
) -> None:
    monkeypatch.setattr("cliquetta.serve.client.time.monotonic", lambda: sum(pauses))

    def server(request: httpx.Request) -> httpx.Response:
        if sum(pauses) < down:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"sessions": []})

    client = client_of(server, retry_seconds=patience)
    if patience > down:
        assert client.sessions() == []
    else:
        with pytest.raises(UnreachableError, match="retry_seconds"):
            client.sessions()
        assert sum(pauses) <= patience


def test_the_client_says_what_is_wrong_with_an_address_and_a_token() -> None:
    with pytest.raises(UserError, match="http://127"):
        Client("127.0.0.1:8765")
    with pytest.raises(UserError, match="one line"):
        Client("http://server", "two\nlines")
    lines = Client("http://server", f"{'t' * 20}\n")  # as a file has it
    assert lines._http.headers["Authorization"] == f"Bearer {'t' * 20}"


def test_the_client_has_errors_of_its_own(
    serve_live: ServeLive, tmp_path: Path
) -> None:
    with pytest.raises(RemoteError, match="CliqueTTA"):
        client_of(lambda request: httpx.Response(200, text="<html>")).health()
    with serve_live(limits={"body_bytes": 10**6}) as address:
        session = Client(address, retry_seconds=5).create_session(
            CLASSES, method="tent"
        )
        with pytest.raises(ImageError):
            session.predict([tmp_path / "gone.png"])
        with pytest.raises(
            RemoteError, match="413"
        ):  # although it is refused before it is sent
            session.predict([bytes(30_000_000)])


def test_a_reset_session_has_learned_nothing(client: Client) -> None:
    session = client.create_session(CLASSES, method="tent")
    session.predict(batch_of(0))
    assert load(session.export_state())["memory.norms.steps"] == 1
    session.reset()
    assert load(session.export_state())["memory.norms.steps"] == 0
