"""Images as bytes, a service in this process and a plain reference, for the serving tests."""

import io
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy
import torch
from PIL import Image
from safetensors.torch import load
from starlette.testclient import TestClient

from cliquetta.methods.building.base import Adapter
from cliquetta.methods.building.registry import create_method, method_config
from cliquetta.methods.building.state import pack_state
from cliquetta.methods.tent import Tent
from cliquetta.model.clip import CLIP
from cliquetta.prompts.classes import ClassPrompts
from cliquetta.serve.asgi import create_app
from cliquetta.serve.auth import Tokens
from cliquetta.serve.client import RemoteSession
from cliquetta.serve.server import make_server, open_port
from cliquetta.serve.service import Service
from cliquetta.serve.session_store import SessionStore
from cliquetta.serve.settings import Limits, Settings
from cliquetta.types import Batch, Prediction

CLASSES = ["airplane", "cat", "frog", "ship", "truck"]
STATEFUL = "tent"  # every prediction depends on all batches before, and on their order
MANY: dict[str, Any] = {"rate": 1e6, "burst": 10**6}  # requests are not limited
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"  # tokens


def bearer(token: str) -> dict[str, str]:
    """Headers of a client with a token."""
    return {"Authorization": f"Bearer {token}"}


def refusal(response: Any) -> tuple[int, str]:
    """Status and code of a response that refuses a request."""
    return response.status_code, response.json()["code"]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a condition, which must come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(seconds / 1000)


def is_up(address: str) -> bool:
    """Whether a server responds at an address."""
    try:
        return httpx.get(f"{address}/healthz", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def picture(seed: int, *, size: int = 32, format: str = "PNG") -> bytes:
    """A smooth random picture as a file."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((size, size), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, format=format)
    return buffer.getvalue()


def batch_of(seed: int, count: int = 4) -> list[bytes]:
    """Some pictures that no other seed has."""
    return [picture(1000 * seed + i) for i in range(count)]


class Alone:
    """The reference: the same method without any service around it."""

    def __init__(self, model: CLIP, method: str = STATEFUL, **options: Any) -> None:
        config = method_config(method, None, options)
        self.adapter: Adapter = create_method(
            method, model, ClassPrompts(tuple(CLASSES)), config
        )

    def predict(self, images: list[bytes]) -> list[dict[str, float]]:
        """Probability by class of every picture."""
        rows = self.adapter.predict(images).probabilities
        return [dict(zip(CLASSES, row.tolist(), strict=True)) for row in rows]


class Local:
    """A service in this process, spoken to over ASGI."""

    def __init__(self, http: TestClient, service: Service) -> None:
        self.http = http
        self.service = service

    def post(self, method: str = STATEFUL, *, token: str = "", **more: Any) -> Any:
        """The response to a request for a session."""
        request = {"classes": CLASSES, "method": method, **more}
        return self.http.post(
            "/v1/sessions", json=request, headers=bearer(token) if token else {}
        )

    def create(self, method: str = STATEFUL, **more: Any) -> str:
        response = self.post(method, **more)
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    def send(self, id: str, images: list[bytes], **fields: Any) -> Any:
        files = [("images", (f"{i}.png", data)) for i, data in enumerate(images)]
        data = {name: str(value) for name, value in fields.items()}
        return self.http.post(f"/v1/sessions/{id}/batches", files=files, data=data)

    def predict(self, id: str, images: list[bytes], **fields: Any) -> dict[str, Any]:
        response = self.send(id, images, top_k=len(CLASSES), **fields)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def check(
        self, id: str, images: list[bytes], alone: Alone, **fields: Any
    ) -> dict[str, Any]:
        """Predict, and check that a method alone predicts the same; returns the response."""
        response = self.predict(id, images, **fields)
        assert probabilities(response) == alone.predict(images)
        return response

    def info(self, id: str) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/sessions/{id}").json())

    def ids(self) -> list[str]:
        """Sessions as listed."""
        return [info["id"] for info in self.http.get("/v1/sessions").json()["sessions"]]

    def state(self, id: str) -> bytes:
        return self.http.get(f"/v1/sessions/{id}/state").content

    def check_state(self, id: str, alone: Alone) -> None:
        """Check that a session learned, bit for bit, what a method did that nobody disturbed."""
        check_equal(self.state(id), pack_state(alone.adapter))

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def make_settings(
    model: CLIP,
    limits: Mapping[str, float] | None = None,
    tokens: Sequence[str] = (),
    **more: Any,
) -> Settings:
    """Offer ``model`` as ``tiny``, to any host if there are tokens; requests are not limited."""
    guarded = {"tokens": Tokens(tokens), "hosts": None} if tokens else {}
    bounds: dict[str, Any] = {**MANY, **(limits or {})}
    settings: dict[str, Any] = {"workers": 2, **guarded, **more}
    return Settings(models={"tiny": model}, limits=Limits(**bounds), **settings)


@contextmanager
def local_service(
    where: Path | str, model: CLIP, *, host: str = "127.0.0.1", **settings: Any
) -> Iterator[Local]:
    """Serve the sessions in a folder or database with such settings until the block ends."""
    with SessionStore.open(where) as store:
        app = create_app(store, make_settings(model, **settings))
        with TestClient(
            app, base_url=f"http://{host}", raise_server_exceptions=False
        ) as http:
            yield Local(http, app.state.service)


@contextmanager
def live_service(
    where: Path | str, model: CLIP, *, port: int = 0, **settings: Any
) -> Iterator[str]:
    """Serve likewise behind a real port of this machine; yields its address."""
    offer = make_settings(model, **settings)
    with SessionStore.open(where) as store:
        server = make_server(create_app(store, offer), offer.limits)
        opened = open_port("127.0.0.1", port)
        thread = threading.Thread(target=server.run, args=([opened],), daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        port = opened.getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(30)


def probabilities(response: dict[str, Any]) -> list[dict[str, float]]:
    """Probability by class of every prediction of a response, as float32 numbers."""
    return [
        {
            entry["label"]: float(np.float32(entry["probability"]))
            for entry in one["top"]
        }
        for one in response["predictions"]
    ]


def check_equal(state: bytes, other: bytes) -> None:
    """Check that two states hold the same bits."""
    one = load(state)
    two = load(other)
    assert one.keys() == two.keys()
    for name in one:
        bits = (
            v.contiguous().view(-1).view(torch.uint8) for v in (one[name], two[name])
        )
        assert torch.equal(*bits), name


@contextmanager
def full_disk(service: Local) -> Iterator[None]:
    """Nothing can be committed inside the block, as databases say it of a full disk."""
    dialect = service.service.sessions._store.database._engine.dialect

    def fail(_: object) -> None:
        if dialect.name == "sqlite":
            raise sqlite3.OperationalError("database or disk is full")
        import psycopg  # which the environment of the web app does not have

        raise psycopg.errors.DiskFull("No space left on secret")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialect, "do_commit", fail)
        yield


class Gate:
    """Holds predictions of Tent until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._opened = threading.Semaphore(0), threading.Event()
        real = Tent._predict

        def held(method: Tent, batch: Batch) -> Prediction:
            self.begun.release()
            self._opened.wait(30)
            return real(method, batch)

        monkeypatch.setattr(Tent, "_predict", held)

    def open(self) -> None:
        self._opened.set()


def make_older(where: Path | str, session: str, days: float) -> None:
    """Let a session be unused for so many days."""
    then = time.time() - 86400 * days
    change_row(
        where, "UPDATE sessions SET used = :then WHERE id = :id", then=then, id=session
    )


def change_row(where: Path | str, statement: str, **values: Any) -> None:
    """Change the database behind the service's back."""
    with SessionStore.open(where) as store, store.database.writing() as connection:
        assert connection.execute(sqlalchemy.text(statement), values).rowcount == 1


class Load:
    """A client that sends batch after batch in a thread and collects every response."""

    pause = 0.0  # seconds between two batches

    def __init__(self, number: int, session: RemoteSession) -> None:
        self.number = number
        self.session = session
        self.responses: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def batch(self, index: int) -> list[bytes]:
        return batch_of(100 * self.number + index, 2)

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and len(self.responses) < 5000:
                response = self.session.predict(
                    self.batch(len(self.responses)), top_k=len(CLASSES)
                )
                self.responses.append(response.model_dump())
                self._stop.wait(self.pause)
        except BaseException as error:
            self.error = error

    def stop(self, seconds: float = 60) -> None:
        """End it; whatever went wrong in its thread is raised here."""
        self._stop.set()
        self._thread.join(seconds)
        assert self.error is None, self.error
        assert not self._thread.is_alive()

    def check(self, state: bytes, alone: Alone) -> None:
        """Check that all responses and a state are those of a run that nobody disturbed."""
        for index, response in enumerate(self.responses):
            assert response["sequence"] == index + 1
            assert probabilities(response) == alone.predict(self.batch(index)), index
        check_equal(state, pack_state(alone.adapter))
