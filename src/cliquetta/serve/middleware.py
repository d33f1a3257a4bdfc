"""Admission of requests before they are read: origin, token, rate, size, time."""

import asyncio
import logging
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cliquetta.serve.auth import LOCAL, check_origin
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.limits import ByteBudget, RateLimiter
from cliquetta.serve.metrics import ServiceMetrics
from cliquetta.serve.settings import Limits, Settings

OPEN_PATHS = frozenset(
    {"/", "/docs", "/docs.js", "/style.css", "/healthz", "/openapi.json"}
)
"""Open without a token: they say nothing about clients."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_WRONG_TOKENS = 10
_PART = 65536

_log = logging.getLogger(__name__)


def guess_limiter(limits: Limits) -> RateLimiter:
    """Counts wrong tokens per address."""
    refusal = "too many wrong tokens from your address; wait"
    return RateLimiter(limits.wrong_token_rate, _WRONG_TOKENS, refusal=refusal)


def client_address(scope: Scope) -> str:
    """The address that a request comes from."""
    return str((scope.get("client") or ("unknown",))[0])


def problem_response(
    error: ServiceError, metrics: ServiceMetrics | None = None
) -> JSONResponse:
    """A refusal as it goes over the wire; it is counted."""
    if metrics is not None:
        metrics.refusals.labels(error.code).inc()
    # names of fields come from clients, and may hold what UTF-8 does not
    message = error.message.encode("utf-8", "replace").decode()
    body = {"code": error.code, "message": message}
    return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))


class AdmissionMiddleware:
    """Admits requests, or refuses them before they reach the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        budget: ByteBudget,
        metrics: ServiceMetrics,
    ) -> None:
        self._app = app
        self._settings = settings
        self._limits = settings.limits
        self._limiter = RateLimiter(self._limits.rate, self._limits.burst)
        self._guesses = guess_limiter(self._limits)
        self._budget = budget
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        seconds = self._limits.response_seconds
        response = _BoundedResponse(send, seconds, self._budget, self._metrics)
        with self._settings.tracing.request(Headers(scope=scope)) as span:
            try:
                await self._pass(scope, receive, response.send)
            finally:
                self._budget.give_back(response.count)
                seconds = time.perf_counter() - start
                span |= self._observe(scope, response, seconds)

    def _observe(
        self, scope: Scope, response: "_BoundedResponse", seconds: float
    ) -> dict[str, Any]:
        """Count and log a request; returns what its span says."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.requests.labels(route, str(response.status)).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        event = {
            "method": method,
            "route": route,
            "status": response.status,
            "seconds": round(seconds, 6),
            "bytes": response.count,
            "owner": scope.get("state", {}).get("owner"),
        }
        _log.info("request", extra=event)
        return {
            "name": f"{method} {route}",
            "session": scope.get("path_params", {}).get("session"),
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": response.status,
        }

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        is_state = scope["path"].endswith("/state")
        most = self._limits.state_bytes if is_state else self._limits.body_bytes
        body = _Body(receive, most, self._limits.body_seconds, self._budget)
        try:
            check_origin(headers, self._settings.hosts)
            scope.setdefault("state", {})["owner"] = self._admit(scope, headers)
            body.check_length(headers.get("content-length"))
        except ServiceError as error:
            await problem_response(error, self._metrics)(scope, receive, send)
            return
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._budget.give_back(body.count)

    def _admit(self, scope: Scope, headers: Headers) -> str:
        """The owner of the request's token; its rate is counted here."""
        if scope["path"] in OPEN_PATHS:
            return LOCAL
        address = client_address(scope)
        if self._settings.tokens is None:
            self._limiter.take(f"address {address}")
            return LOCAL
        self._guesses.take(address, cost=0)
        try:
            owner = self._settings.tokens.owner(headers.get("authorization"))
        except ServiceError:
            self._guesses.take(address)
            raise
        self._limiter.take(f"owner {owner}")
        return owner


class _Body:
    """A request body that is counted and timed while it arrives."""

    def __init__(
        self, source: Receive, most: int, seconds: float, budget: ByteBudget
    ) -> None:
        self._source = source
        self._most = most
        self._budget = budget
        self._end = time.monotonic() + seconds
        self._complete = False
        self.count = 0

    def check_length(self, announced: str | None) -> None:
        """Refuse by the announced length before a byte is read."""
        if (
            announced is not None
            and announced.isdecimal()
            and int(announced) > self._most
        ):
            raise self._too_large()

    async def receive(self) -> Message:
        """The next part, as long as the limits hold."""
        if self._complete:
            return await self._source()
        try:
            left = max(self._end - time.monotonic(), 0.0)
            message = await asyncio.wait_for(self._source(), left)
        except asyncio.TimeoutError:
            raise _closing(
                408, "too_slow", "the request took too long to arrive"
            ) from None
        part = len(message.get("body", b""))
        if self.count + part > self._most:
            raise self._too_large()
        self._budget.take(part)
        self.count += part
        self._complete = not message.get("more_body", False)
        return message

    def _too_large(self) -> ServiceError:
        return _closing(413, "too_large", f"a request may have {self._most:,} bytes")


class _BoundedResponse:
    """A response that is counted as memory and sent in parts, within its time."""

    def __init__(
        self, target: Send, seconds: float, budget: ByteBudget, metrics: ServiceMetrics
    ) -> None:
        self._target = target
        self._seconds = seconds
        self._budget = budget
        self._metrics = metrics
        self._head: Message | None = None
        self._end = 0.0
        self._dropped = False
        self.count = 0
        self.status = 500

    async def send(self, message: Message) -> None:
        """Send a part of the response; after a refusal or at the end of its time, drop it."""
        if self._dropped:
            return
        if message["type"] == "http.response.start":
            # held back until the first part, so that a response without room can be
            # refused
            self._head = message
            self.status = message["status"]
            return
        body = message.get("body", b"")
        try:
            self._budget.take(len(body))
        except ServiceError as error:
            self._dropped = True
            self.status = error.status_code
            refusal = problem_response(error, self._metrics)
            head = {"type": "http.response.start", "status": self.status}
            await self._target({**head, "headers": refusal.raw_headers})
            await self._target({"type": "http.response.body", "body": refusal.body})
            return
        self.count += len(body)
        try:
            await self._send_parts(message, body)
        except (asyncio.TimeoutError, asyncio.CancelledError):  # or the server stops
            self._dropped = True  # incomplete: the connection is closed

    async def _send_parts(self, message: Message, body: bytes) -> None:
        head = self._head
        if head is not None:
            self._head = None
            self._end = time.monotonic() + self._seconds
            await self._target(head)
        follows = message.get("more_body", False)
        for first in range(0, max(len(body), 1), _PART):
            last = first + _PART
            part = {
                **message,
                "body": body[first:last],
                "more_body": follows or last < len(body),
            }
            left = max(self._end - time.monotonic(), 0.0)
            await asyncio.wait_for(self._target(part), left)


def _closing(status: int, code: str, message: str) -> ServiceError:
    """A refusal after which the connection cannot be used again."""
    return ServiceError(status, code, message, headers={"Connection": "close"})


class CSPMiddleware:
    """Sends a Content-Security-Policy with every response."""

    def __init__(self, app: ASGIApp, policy: str) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and add the headers to its response."""

        async def mark(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = self._policy
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self._app(scope, receive, mark)
