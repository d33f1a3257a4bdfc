"""In front of replicas: admits requests, keeps the order of sessions, sends lost requests again."""

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from urllib.parse import unquote

from prometheus_client.metrics_core import Metric
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cliquetta.serve.errors import ServiceError, incident
from cliquetta.serve.limits import ByteBudget
from cliquetta.serve.metrics import CONTENT_TYPE, ServiceMetrics
from cliquetta.serve.middleware import AdmissionMiddleware, problem_response
from cliquetta.serve.settings import Settings

_SESSION = re.compile("/v1/sessions/([0-9a-f]{32})(/.*)?")
_LONGEST_PAUSE = 2.0


class LostError(Exception):
    """A replica did not respond; whether it has done what was asked is unknown."""


@dataclass(frozen=True)
class Forwarded:
    """A request as it travels to a replica."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    owner: str
    key: str  # of this request and, if it makes a session, of that: sent twice, it counts once
    trace: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """Response of a replica."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    route: str


Ask = Callable[[str, Forwarded], Awaitable[Reply]]  # the replica of a session, or `LostError`
Watch = Callable[[], Awaitable[Mapping[str, list[Metric]]]]  # metrics of the replicas by name


async def run_app(app: ASGIApp, request: Forwarded) -> Reply:
    """The response of an application in this process."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": request.method,
        "path": unquote(request.path),
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "state": {"owner": request.owner, "key": request.key},
    }
    status, headers, parts = 500, (), []

    async def receive() -> Message:
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], tuple(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    route = getattr(scope.get("route"), "path", "none")
    return Reply(status, headers, b"".join(parts), route)


def create_router(settings: Settings, ask: Ask, watch: Watch) -> ASGIApp:
    """The application in front of replicas, with the bounds of a server without them."""
    metrics, budget = ServiceMetrics(), ByteBudget(settings.limits.queued_bytes)
    metrics.watch("body_bytes", "Requests and responses in memory.", lambda: budget.used)
    router = Router(settings, metrics, ask, watch)
    return AdmissionMiddleware(router, settings=settings, budget=budget, metrics=metrics)


class Router:
    """An ASGI application that asks replicas. Requests of one session take turns."""

    def __init__(self, settings: Settings, metrics: ServiceMetrics, ask: Ask, watch: Watch) -> None:
        self._limits, self._tracing = settings.limits, settings.tracing
        self._metrics, self._ask, self._watch = metrics, ask, watch
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request, or begin and end with the server."""
        if scope["type"] == "lifespan":
            for moment in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{moment}.complete"})
            return
        try:
            response = await self._respond(scope, receive)
        except ServiceError as error:
            response = problem_response(error, self._metrics)
        except ClientDisconnect:
            return
        except Exception as error:
            response = problem_response(incident(error), self._metrics)
        await response(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive) -> Response:
        if scope["path"] == "/metrics" and scope["method"] == "GET":
            scope["route"] = SimpleNamespace(path="/metrics")
            return Response(self._metrics.render(await self._watch()), media_type=CONTENT_TYPE)
        forwarded = await self._forward(scope, receive)
        response = Response(forwarded.body, forwarded.status)
        response.raw_headers = list(forwarded.headers)
        return response

    async def _forward(self, scope: Scope, receive: Receive) -> Reply:
        request = Forwarded(
            method=scope["method"],
            path=scope["raw_path"].decode("latin-1").partition("?")[0],
            query=scope["query_string"],
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            body=await Request(scope, receive).body(),
            owner=scope["state"]["owner"],
            key=secrets.token_hex(16),
            trace=self._tracing.headers(),
        )
        path = _SESSION.fullmatch(request.path)
        session = request.key if path is None else path[1]
        if path is None or (request.method == "GET" and path[2] is None):  # a look does not wait
            response = await self._ask_until(session, request)
        else:
            async with self._turn(session):
                response = await self._ask_until(session, request)
        scope["route"] = SimpleNamespace(path=response.route)
        scope["path_params"] = {} if path is None else {"session": session}
        return response

    @asynccontextmanager
    async def _turn(self, session: str) -> AsyncIterator[None]:
        """Wait until all earlier requests of a session are done, wherever they are."""
        waiting = self._waiting.get(session, 0)
        if waiting > self._limits.queued_per_session:
            message = f"{waiting} requests of this session are waiting already"
            raise ServiceError(429, "session_busy", message, retry_after=1)
        turn = self._turns.setdefault(session, asyncio.Lock())
        self._waiting[session] = waiting + 1
        try:
            try:
                await asyncio.wait_for(turn.acquire(), self._limits.wait_seconds)
            except asyncio.TimeoutError:
                late = "waited too long in the queue"
                raise ServiceError(503, "overloaded", late, retry_after=5) from None
            try:
                yield
            finally:
                turn.release()
        finally:
            self._waiting[session] -= 1
            if not self._waiting[session]:
                del self._waiting[session], self._turns[session]

    async def _ask_until(self, session: str, request: Forwarded) -> Reply:
        """The response of the session's replica, or of the one that has the session after it."""
        end = time.monotonic() + self._limits.wait_seconds + self._limits.batch_seconds
        for attempt in itertools.count():
            try:
                left = max(end - time.monotonic(), 0.0)
                response = await asyncio.wait_for(self._ask(session, request), left)
            except LostError:
                self._metrics.resent.inc()
                await asyncio.sleep(min(_LONGEST_PAUSE, 0.1 * 2 ** min(attempt, 10)))
                continue
            except asyncio.TimeoutError:
                message = "no replica has responded in time: send it again with the same sequence"
                raise ServiceError(503, "out_of_time", message, retry_after=5) from None
            if attempt and request.method == "DELETE" and response.status == 404:
                return replace(response, status=204, headers=(), body=b"")  # the lost one did it
            return response
        raise AssertionError("the loop returns or raises")
