"""What every request passes before anything of it is read: origin, token, rate, size, time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cliquetta.serve.auth import LOCAL, Tokens
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.limits import ByteBudget, Limits, RateLimiter
from cliquetta.serve.metrics import Metrics

OPEN_PATHS = frozenset({"/healthz", "/openapi.json"})
"""Answered without a token: they say nothing about clients."""


def problem_response(error: ServiceError) -> JSONResponse:
    """A refusal as it goes over the wire."""
    # names of fields come from clients, and may hold what UTF-8 does not
    message = error.message.encode("utf-8", "replace").decode()
    body = {"code": error.code, "message": message}
    return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))


class Gate:
    """ASGI middleware; requests that it refuses never reach the application.

    ``hosts`` are the names under which a server without tokens may be addressed: a web page that
    points a name of its own at this machine is turned away.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens | None,
        hosts: frozenset[str] | None,
        limits: Limits,
        budget: ByteBudget,
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._tokens, self._hosts, self._limits = tokens, hosts, limits
        self._limiter = RateLimiter(limits.rate, limits.burst)
        self._budget, self._metrics = budget, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._pass(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - start)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        body = _Body(receive, self._limit_of(scope), self._limits.body_seconds, self._budget)
        try:
            try:
                self._check_origin(headers)
                scope.setdefault("state", {})["owner"] = self._admit(scope, headers)
                body.check_length(headers.get("content-length"))
            except ServiceError as error:
                await problem_response(error)(scope, receive, send)
                return
            await self._app(scope, body.receive, send)
        finally:
            self._budget.give_back(body.count)

    def _limit_of(self, scope: Scope) -> int:
        is_state = scope["path"].endswith("/state")
        return self._limits.state_bytes if is_state else self._limits.body_bytes

    def _admit(self, scope: Scope, headers: Headers) -> str:
        """The owner that the request speaks for; its rate is counted here."""
        if scope["path"] in OPEN_PATHS:
            return LOCAL
        address = (scope.get("client") or ("unknown",))[0]
        if self._tokens is None:
            self._limiter.take(f"address {address}")
            return LOCAL
        try:
            owner = self._tokens.owner(headers.get("authorization"))
        except ServiceError:
            self._limiter.take(f"address {address}")  # guessing is slow too
            raise
        self._limiter.take(f"owner {owner}")
        return owner

    def _check_origin(self, headers: Headers) -> None:
        """Turn away what a web page of somebody else made a browser send."""
        host = headers.get("host", "")
        if self._hosts is not None and _name_of(host) not in self._hosts:
            raise ServiceError(403, "forbidden", "this server is addressed by its local name only")
        origin = headers.get("origin")
        if origin is not None and _netloc_of(origin) != host:
            raise ServiceError(403, "forbidden", "requests of other sites' pages are not answered")


class _Body:
    """A request body that is counted and timed while it arrives."""

    def __init__(self, source: Receive, most: int, seconds: float, budget: ByteBudget) -> None:
        self._source, self._most, self._budget = source, most, budget
        self._end = time.monotonic() + seconds
        self._complete = False
        self.count = 0

    def check_length(self, announced: str | None) -> None:
        """Refuse by the announced length before a byte is read."""
        if announced is not None and announced.isdecimal() and int(announced) > self._most:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next part, as long as the limits hold."""
        if self._complete:
            return await self._source()
        message = await _within(self._source, self._end - time.monotonic())
        part = len(message.get("body", b""))
        if self.count + part > self._most:
            raise self._too_large()
        self._budget.take(part)
        self.count += part
        self._complete = not message.get("more_body", False)
        return message

    def _too_large(self) -> ServiceError:
        error = ServiceError(413, "too_large", f"a request may have {self._most:,} bytes")
        error.headers = {"Connection": "close"}
        return error


async def _within(source: Callable[[], Awaitable[Message]], seconds: float) -> Message:
    try:
        return await asyncio.wait_for(source(), max(seconds, 0.0))
    except asyncio.TimeoutError:
        error = ServiceError(408, "too_slow", "the request took too long to arrive")
        error.headers = {"Connection": "close"}
        raise error from None


def _netloc_of(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""


def _name_of(host: str) -> str:
    """The name of a ``Host`` header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
