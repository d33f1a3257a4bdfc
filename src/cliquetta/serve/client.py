"""The service from Python: sessions as objects, safe repeats, typed responses.

>>> client = Client("http://127.0.0.1:8765")  # doctest: +SKIP
>>> session = client.create_session(["cat", "dog"], method="domain_norm")  # doctest: +SKIP
>>> session.predict(["a.jpg", "b.jpg"]).predictions[0].label  # doctest: +SKIP
'cat'
"""

from __future__ import annotations

import io
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from cliquetta.data.images import read_image
from cliquetta.data.inputs import ImageLike, separate_images, to_picture
from cliquetta.data.remote import is_url
from cliquetta.errors import UserError
from cliquetta.prompts.classes import DEFAULT_TEMPLATE
from cliquetta.serve import schema

T = TypeVar("T", bound=BaseModel)
_SHORTEST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0


class RemoteError(RuntimeError):
    """The server refused; ``code`` is for programs."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status = status
        self.code = code
        super().__init__(f"{message} ({code}, HTTP {status})")

    @classmethod
    def of(cls, response: httpx.Response) -> RemoteError:
        """The error that a response states."""
        try:
            problem = schema.Problem.model_validate_json(response.content)
        except ValueError:
            problem = schema.Problem(code="unknown", message=response.reason_phrase)
        return cls(response.status_code, problem.code, problem.message)


class UnreachableError(ConnectionError):
    """No server responded within the time to retry."""


class Client:
    """A server's sessions.

    A request that finds the server busy or gone is repeated, after the pause that the
    server asks for or a growing one. Repeats change nothing twice: batches carry their
    number, new sessions a key of their own, and all else may be repeated.

    Args:
        url: Address of the server.
        token: The server's token, if it asks for one; sessions belong to it.
        timeout: Seconds that one request may take.
        retry_seconds: How long a request is repeated; long enough for a server to
            restart.

    Raises:
        UserError: The address is not of ``http(s)``, or the token not one line of
            ASCII.

    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = 120.0,
        retry_seconds: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(
                f"{url!r} is no address of a server, such as http://127.0.0.1:8765"
            )
        token = (token or "").strip()
        if not (token.isascii() and token.isprintable()):
            raise UserError("a token is one line of ASCII characters")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
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
        method: str = schema.DEFAULT_METHOD,
        model: str | None = None,
        preset: str | None = None,
        options: Mapping[str, schema.Option] | None = None,
        templates: Sequence[str] = (DEFAULT_TEMPLATE,),
        seed: int = 0,
        reject: float | None = None,
        calibrate: bool = False,
    ) -> RemoteSession:
        """Create a session; the arguments are those of ``POST /v1/sessions``."""
        body = {
            "classes": list(classes),
            "templates": list(templates),
            "model": model,
            "method": method,
            "preset": preset,
            "options": dict(options or {}),
            "seed": seed,
            "reject": reject,
            "calibrate": calibrate,
        }
        headers = {schema.CREATION_KEY: secrets.token_hex(16)}
        info = self.ask(
            schema.SessionInfo, "POST", "/v1/sessions", json=body, headers=headers
        )
        return RemoteSession(self, info)

    def session(self, id: str) -> RemoteSession:
        """A session that exists already."""
        return RemoteSession(
            self, self.ask(schema.SessionInfo, "GET", f"/v1/sessions/{id}")
        )

    def sessions(self) -> list[schema.SessionInfo]:
        """All sessions of this client's token, oldest first."""
        return self.ask(schema.SessionList, "GET", "/v1/sessions").sessions

    def models(self) -> list[schema.ModelInfo]:
        """The models that sessions may use."""
        return self.ask(schema.ModelList, "GET", "/v1/models").models

    def methods(self) -> list[schema.MethodInfo]:
        """The methods that sessions may use."""
        return self.ask(schema.MethodList, "GET", "/v1/methods").methods

    def health(self) -> schema.Health:
        """Whether the server responds."""
        return self.ask(schema.Health, "GET", "/healthz")

    def ask(self, kind: type[T], method: str, path: str, **content: Any) -> T:
        """Parse the response to a request; see :meth:`send`."""
        response = self.send(method, path, **content)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError:
            message = "not a response of CliqueTTA, or of another version of it"
            raise RemoteError(response.status_code, "unknown", message) from None

    def send(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Send one request, and repeat it while the server is busy or gone.

        Raises:
            RemoteError: The server refused it, or is still busy.
            UnreachableError: No server responded.

        """
        end = time.monotonic() + self._retry_seconds
        for attempt in count():
            growing = min(_LONGEST_PAUSE, _SHORTEST_PAUSE * 2.0 ** min(attempt, 10))
            failed: Exception
            try:
                response = self._http.request(method, path, **content)
                if response.is_success:
                    return response
                pause = _pause(response, growing)
                failed = RemoteError.of(response)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                pause = growing
                failed = UnreachableError(
                    f"no response from {self._http.base_url} ({reason}): is the server running? "
                    f"Requests are repeated for retry_seconds={self._retry_seconds:g}"
                )
            if pause is None or time.monotonic() + pause > end:
                raise failed
            time.sleep(pause)
        raise AssertionError("the loop returns or raises")


class RemoteSession:
    """One session on a server, for one thread: its batches have an order."""

    def __init__(self, client: Client, info: schema.SessionInfo) -> None:
        self._client = client
        self._path = f"/v1/sessions/{info.id}"
        # where there are replicas, balancers send the same id to the same one: that is
        # faster
        self._headers = {schema.SESSION_HEADER: info.id}
        self.id = info.id
        self.classes = tuple(info.classes)
        self.sequence = info.sequence  # number of the last batch that was predicted

    def predict(
        self, images: Any, *, top_k: int = 5, evidence: bool = False
    ) -> schema.BatchResponse:
        """Classify a batch, which the session learns from once, however often it is repeated.

        After an :class:`UnreachableError` it is unknown whether the session has learned
        from the batch: repeat the call, or take the session anew from
        :meth:`Client.session`.

        Args:
            images: Whatever :func:`cliquetta.predict` takes of files and pictures.
            top_k: Classes to list per image.
            evidence: Whether to return what the prediction is based on.

        Returns:
            Predictions, and the images that the server could not read.

        Raises:
            ImageError: A file of this machine is missing or empty.
            RemoteError: The server refused the batch.
            UnreachableError: No server responded.

        """
        separate = enumerate(separate_images(images, None))
        files = [("images", _file(index, image)) for index, image in separate]
        fields = {"sequence": self.sequence + 1, "top_k": top_k, "evidence": evidence}
        response = self._client.ask(
            schema.BatchResponse,
            "POST",
            f"{self._path}/batches",
            files=files,
            data=fields,
            headers=self._headers,
        )
        self.sequence = response.sequence
        return response

    def info(self) -> schema.SessionInfo:
        """The session's state on the server."""
        return self._client.ask(
            schema.SessionInfo, "GET", self._path, headers=self._headers
        )

    def reset(self) -> None:
        """Forget what was learned; batch numbers continue."""
        self._client.send("POST", f"{self._path}/reset", headers=self._headers)

    def set_classes(
        self, classes: Sequence[str], *, templates: Sequence[str] | None = None
    ) -> None:
        """Classify among other classes from the next batch on.

        What was learned apart from the classes stays; methods that learn nothing else
        refuse.
        """
        texts = None if templates is None else list(templates)
        body = {"classes": list(classes), "templates": texts}
        path = f"{self._path}/classes"
        info = self._client.ask(
            schema.SessionInfo, "PUT", path, json=body, headers=self._headers
        )
        self.classes = tuple(info.classes)

    def export_state(self) -> bytes:
        """A state file of what was learned; other sessions read it, too."""
        return self._client.send(
            "GET", f"{self._path}/state", headers=self._headers
        ).content

    def import_state(self, state: bytes) -> None:
        """Continue from a state that an equal session exported."""
        headers = {**self._headers, "Content-Type": "application/octet-stream"}
        self._client.send("PUT", f"{self._path}/state", content=state, headers=headers)

    def delete(self) -> None:
        """Remove the session from the server; one that is gone already is no error."""
        try:
            self._client.send("DELETE", self._path)
        except RemoteError as error:
            if error.status != 404:
                raise


def _pause(response: httpx.Response, growing: float) -> float | None:
    """Seconds to wait before a refused request is sent again; ``None`` if it should not be."""
    asked = response.headers.get("retry-after", "").strip()
    try:
        if asked.isdecimal():
            return max(_SHORTEST_PAUSE, float(asked))
        return max(
            _SHORTEST_PAUSE, parsedate_to_datetime(asked).timestamp() - time.time()
        )
    except ValueError:
        # a proxy lost the server or its response: as after a broken connection
        is_lost = not asked and RemoteError.of(response).code == "unknown"
        return growing if is_lost and response.status_code >= 500 else None


def _file(index: int, image: ImageLike) -> tuple[str, bytes]:
    """Name and bytes of an image; those in memory are sent as PNG, which is lossless."""
    if isinstance(image, bytes | bytearray):
        return f"{index}", bytes(image)
    if isinstance(image, str | os.PathLike) and not is_url(str(image)):
        return Path(image).name, read_image(image)
    buffer = io.BytesIO()
    to_picture(image)[1].save(buffer, format="PNG")
    return f"{index}.png", buffer.getvalue()
