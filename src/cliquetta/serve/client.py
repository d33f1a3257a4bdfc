"""The service from Python: sessions as objects, repeats that are safe, answers with types.

>>> client = Client("http://127.0.0.1:8765")  # doctest: +SKIP
>>> session = client.create_session(["cat", "dog"], method="domain_norm")  # doctest: +SKIP
>>> session.predict(["a.jpg", "b.jpg"]).predictions[0].label  # doctest: +SKIP
'cat'
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from cliquetta.data.inputs import ImageLike, separate_images, to_picture
from cliquetta.data.remote import is_url
from cliquetta.prompts.classes import DEFAULT_TEMPLATE
from cliquetta.serve.schema import (
    DEFAULT_METHOD,
    BatchAnswer,
    ClassesRequest,
    Health,
    MethodInfo,
    MethodList,
    ModelInfo,
    ModelList,
    Option,
    Problem,
    SessionInfo,
    SessionList,
    SessionRequest,
)


class RemoteError(RuntimeError):
    """The server refused; ``code`` is for programs."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status = status
        self.code = code
        super().__init__(f"{message} ({code}, HTTP {status})")


class UnreachableError(ConnectionError):
    """No server answered within the time to retry."""


class Client:
    """A server's sessions.

    A request that finds the server busy or gone is repeated, after the pause that the server asks
    for or a growing one. Repeats change nothing twice: batches carry their number, and all else
    that is repeated may be.

    Args:
        url: Address of the server.
        token: What the server was given as a token, if any; sessions belong to it.
        timeout: Seconds that one request may take.
        retry_seconds: How long a request is repeated; long enough for a server to restart.

    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = 120.0,
        retry_seconds: float = 60.0,
    ) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        self._retry_seconds = retry_seconds

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; sessions stay on the server."""
        self._http.close()

    def create_session(
        self,
        classes: Sequence[str],
        *,
        method: str = DEFAULT_METHOD,
        model: str | None = None,
        preset: str | None = None,
        options: Mapping[str, Option] | None = None,
        templates: Sequence[str] = (DEFAULT_TEMPLATE,),
        seed: int = 0,
        reject: float | None = None,
        calibrate: bool = False,
    ) -> RemoteSession:
        """Create a session; not repeated when an answer is lost: it might leave two of them."""
        request = SessionRequest(
            classes=list(classes),
            templates=list(templates),
            model=model,
            method=method,
            preset=preset,
            options=dict(options or {}),
            seed=seed,
            reject=reject,
            calibrate=calibrate,
        )
        answer = self.send("POST", "/v1/sessions", json=request.model_dump(), lost=False)
        return RemoteSession(self, SessionInfo.model_validate_json(answer.content))

    def session(self, id: str) -> RemoteSession:
        """A session that exists already."""
        answer = self.send("GET", f"/v1/sessions/{id}")
        return RemoteSession(self, SessionInfo.model_validate_json(answer.content))

    def sessions(self) -> list[SessionInfo]:
        """All sessions of this client's token, oldest first."""
        answer = self.send("GET", "/v1/sessions")
        return SessionList.model_validate_json(answer.content).sessions

    def models(self) -> list[ModelInfo]:
        """The models that sessions may use."""
        return ModelList.model_validate_json(self.send("GET", "/v1/models").content).models

    def methods(self) -> list[MethodInfo]:
        """The methods that sessions may use."""
        return MethodList.model_validate_json(self.send("GET", "/v1/methods").content).methods

    def health(self) -> Health:
        """Whether the server answers."""
        return Health.model_validate_json(self.send("GET", "/healthz").content)

    def send(self, method: str, path: str, *, lost: bool = True, **content: Any) -> httpx.Response:
        """One request with its repeats; ``lost`` says whether it may be sent again unanswered.

        Raises:
            RemoteError: The server refused it, or is still busy.
            UnreachableError: No server answered.

        """
        end = time.monotonic() + self._retry_seconds
        for attempt in count():
            pause: float | None = _growing(attempt)
            failed: Exception
            try:
                answer = self._http.request(method, path, **content)
                if answer.is_success:
                    return answer
                pause, failed = _pause(answer, attempt, lost), _error(answer)
            except httpx.TransportError as error:
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                pause = pause if lost or unsent else None
                reason = str(error) or type(error).__name__
                failed = UnreachableError(
                    f"no answer from {self._http.base_url} ({reason}): is the server running? "
                    f"Requests that can be repeated are, for retry_seconds={self._retry_seconds:g}"
                )
            if pause is None or time.monotonic() + pause > end:
                raise failed
            time.sleep(pause)
        raise AssertionError("a request is answered or raises")


class RemoteSession:
    """One session on a server, for one thread: its batches have an order."""

    def __init__(self, client: Client, info: SessionInfo) -> None:
        self._client = client
        self._path = f"/v1/sessions/{info.id}"
        self.id = info.id
        self.classes = tuple(info.classes)
        self.sequence = info.sequence
        """Number of the last batch that was answered."""

    def predict(self, images: Any, *, top_k: int = 5, evidence: bool = False) -> BatchAnswer:
        """Classify a batch, which the session learns from once, however often it is repeated.

        ``images`` are whatever :func:`cliquetta.predict` takes of files and pictures.
        """
        given = separate_images(images, None)
        files = [("images", _file(place, image)) for place, image in enumerate(given)]
        fields = {
            "sequence": str(self.sequence + 1),
            "top_k": str(top_k),
            "evidence": "true" if evidence else "false",
        }
        answer = self._client.send("POST", f"{self._path}/batches", files=files, data=fields)
        parsed = BatchAnswer.model_validate_json(answer.content)
        self.sequence = parsed.sequence
        return parsed

    def info(self) -> SessionInfo:
        """The session's state on the server."""
        answer = self._client.send("GET", self._path)
        return SessionInfo.model_validate_json(answer.content)

    def reset(self) -> None:
        """Forget what was learned; batch numbers continue."""
        self._client.send("POST", f"{self._path}/reset")

    def set_classes(
        self, classes: Sequence[str], *, templates: Sequence[str] | None = None
    ) -> None:
        """Classify among other classes from the next batch on.

        What was learned apart from the classes is kept; methods that keep nothing refuse.
        """
        texts = None if templates is None else list(templates)
        request = ClassesRequest(classes=list(classes), templates=texts)
        answer = self._client.send("PUT", f"{self._path}/classes", json=request.model_dump())
        self.classes = tuple(SessionInfo.model_validate_json(answer.content).classes)

    def export_state(self) -> bytes:
        """What was learned, as ``methods.state.load_state`` and other sessions read it."""
        return self._client.send("GET", f"{self._path}/state").content

    def import_state(self, state: bytes) -> None:
        """Continue from a state that an equal session exported."""
        headers = {"Content-Type": "application/octet-stream"}
        self._client.send("PUT", f"{self._path}/state", content=state, headers=headers)

    def delete(self) -> None:
        """Remove the session from the server; one that is gone already is no error."""
        try:
            self._client.send("DELETE", self._path)
        except RemoteError as error:
            if error.status != 404:
                raise


def _pause(answer: httpx.Response, attempt: int, lost: bool) -> float | None:
    """Seconds to wait before a refused request is sent again; ``None`` if it should not be."""
    asked = answer.headers.get("retry-after", "").strip()
    if asked.isdecimal():
        return float(asked)
    try:
        moment = parsedate_to_datetime(asked)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())
    except ValueError:
        # a proxy lost the server or its answer: as after a broken connection
        return _growing(attempt) if lost and answer.status_code in (502, 504) else None


def _growing(attempt: int) -> float:
    return min(5.0, 0.2 * 2.0**attempt)


def _file(place: int, image: ImageLike) -> tuple[str, bytes]:
    """Name and bytes of an image; those in memory are sent as PNG, which is lossless."""
    if isinstance(image, bytes):
        return f"{place}", image
    if isinstance(image, str | os.PathLike) and not is_url(str(image)):
        return Path(image).name, Path(image).read_bytes()
    buffer = io.BytesIO()
    to_picture(image)[1].save(buffer, format="PNG")
    return f"{place}.png", buffer.getvalue()


def _error(answer: httpx.Response) -> RemoteError:
    try:
        problem = Problem.model_validate_json(answer.content)
    except ValueError:
        return RemoteError(answer.status_code, "unknown", answer.reason_phrase)
    return RemoteError(answer.status_code, problem.code, problem.message)
