"""Start the service: the store locked, the port opened, connections bounded."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from cliquetta.errors import UserError
from cliquetta.serve.asgi import create_app
from cliquetta.serve.auth import check_binding
from cliquetta.serve.logs import logging_as
from cliquetta.serve.session_store import SessionStore
from cliquetta.serve.settings import Limits, Settings

STOPPING_SECONDS = 6
"""Time for requests that have begun to be answered when the server is stopped."""
# connections accepted at once, each a file descriptor before it can be refused
_BACKLOG = 128
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\n\r\n"
)


def serve(
    settings: Settings,
    where: Path | str,
    *,
    host: str,
    port: int,
    log_format: str = "text",
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until the process is stopped; every acknowledged response is on disk.

    Args:
        settings: What to serve.
        where: Folder or URL of the database of the sessions.
        host: Address to listen on.
        port: Port to listen on.
        log_format: ``text`` or ``json``.
        on_ready: Called once the port is open.

    """
    check_binding(host, settings.tokens)
    # Python remembers every different warning, and a client's file can make any number
    # of them.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with (
        logging_as(log_format),
        SessionStore.open(where) as store,
        open_port(host, port) as opened,
        ending_at_sigterm(),
    ):
        on_ready()
        app = create_app(store, settings)
        try:
            make_server(app, settings.limits).run(sockets=[opened])
        except (SystemExit, KeyboardInterrupt):
            if app.state.service.pool.count:
                # work that does not end has changed nothing, and Python would wait for
                # it
                settings.tracing.close()
                os._exit(0)
            raise
        finally:
            settings.tracing.close()


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process as Ctrl-C does, with its clean-up, and with success."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def open_port(host: str, port: int) -> socket.socket:
    """Listen on an address, or say what to do where it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} is in use: choose another one with --port"
            ) from None
        raise UserError(
            f"cannot listen on {host}, port {port}: {error.strerror}"
        ) from None


def make_server(app: ASGIApp, limits: Limits) -> uvicorn.Server:
    """A server that closes connections beyond their number and their time."""

    class Protocol(BoundedProtocol):
        bounds = limits
        waiting: ClassVar[OrderedDict[BoundedProtocol, None]] = OrderedDict()

    config = uvicorn.Config(
        app,
        http=Protocol,
        loop="asyncio",  # whatever else is installed: the bounds were tried on it
        ws="none",
        backlog=_BACKLOG,
        access_log=False,
        server_header=False,
        log_config=None,  # ours: see logs.py
        timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]  # a delay of asyncio's
        timeout_graceful_shutdown=STOPPING_SECONDS,
    )
    return uvicorn.Server(config)


class BoundedProtocol(H11Protocol):
    """HTTP with bounds for what the middleware does not see: heads of requests, stalled readers.

    At the cap on connections, the one that has waited longest without a request makes
    room.
    """

    bounds: ClassVar[Limits]
    waiting: ClassVar[
        OrderedDict[BoundedProtocol, None]
    ]  # without a request, longest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; if there are too many, close an idle one or this one."""
        # asyncio does so itself for sockets that it has opened: without it the body of
        # a response waits for the receipt of its head, which a client delays by 40 ms
        transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )
        self._timers: dict[str, asyncio.TimerHandle] = {}
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            if self.waiting:
                self.waiting.popitem(last=False)[0].transport.abort()
            else:
                transport.write(_FULL)
                transport.close()
        self._begin("head", self.bounds.header_seconds)
        self.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        for name in tuple(self._timers):
            self._end(name)
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes; the deadline of a head ends where its request begins."""
        before = self.cycle
        if before is None or before.response_complete:
            self._begin("head", self.bounds.header_seconds)
        super().data_received(data)
        if self.cycle is not before:
            self._end("head")
            self.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        """The connection is idle again."""
        if not self.transport.is_closing():
            self.waiting[self] = None
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read: give it some time."""
        self._begin("write", self.bounds.response_seconds)
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._end("write")
        super().resume_writing()

    def _begin(self, name: str, seconds: float) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _end(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
