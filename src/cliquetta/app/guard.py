"""What keeps the web app to itself: who may come in, and where a page may reach."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cliquetta.serve.auth import Tokens
from cliquetta.serve.errors import ServiceError

POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "form-action 'self'; frame-ancestors 'self'; object-src 'none'"
)
"""A page may load and send nothing from or to another machine, whatever its scripts would like."""


class CSPMiddleware:
    """Sends :data:`POLICY` with every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and mark its answer."""

        async def mark(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = POLICY
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self.app(scope, receive, mark)


def server_settings(hosts: Collection[str] | None) -> dict[str, Any]:
    """Settings of the web server; ``hosts`` are the names it answers to, ``None`` for any.

    A foreign page that has its own name point to this machine is turned away by them.
    """
    middleware = [Middleware(CSPMiddleware)]
    if hosts is not None:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=sorted(hosts)))
    return {"middleware": middleware, "docs_url": None, "redoc_url": None, "openapi_url": None}


def token_auth(tokens: Tokens) -> Callable[[str, str], bool]:
    """Lets in who knows a token, under any name."""

    def opens(name: str, password: str) -> bool:
        del name
        try:
            tokens.owner(f"Bearer {password}")
        except ServiceError:
            return False
        return True

    return opens
