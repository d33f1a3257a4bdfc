"""Start the web app: who may open it, what a page may reach, where uploads are stored."""

import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cliquetta.app.controller import Controller
from cliquetta.serve import middleware as admission
from cliquetta.serve.auth import Tokens, check_binding, check_origin
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.limits import RateLimiter
from cliquetta.serve.server import open_port
from cliquetta.serve.settings import Settings

POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "form-action 'self'; frame-ancestors 'self'; object-src 'none'"
)
"""A page may load nothing from and send nothing to another machine, whatever its scripts try."""

_FOLDER = "cliquetta-app-"


def serve(
    settings: Settings,
    *,
    host: str,
    port: int,
    open_browser: bool = False,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Show the app until the process is stopped; ``on_ready`` is called once the port is free.

    Uploads are deleted on Ctrl-C and SIGTERM, and at the next start after a SIGKILL.
    """
    check_binding(host, settings.tokens)
    open_port(host, port).close()
    # Python remembers every different warning, and a visitor's file can cause any
    # number of them.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    delete_left_uploads()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{os.getpid()}-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = str(Path(folder) / "uploads")
        from cliquetta.app.interface import launch

        on_ready()
        launch(
            Controller(settings, Path(folder)),
            host=host,
            port=port,
            open_browser=open_browser,
            auth=None if settings.tokens is None else token_auth(settings.tokens),
            app_kwargs=server_settings(settings),
        )


def delete_left_uploads() -> None:
    """Delete folders of apps that were killed: their process is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        number = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if not number.isdecimal():
            continue
        pid = int(number)
        if pid == os.getpid() or not _is_running(pid):
            shutil.rmtree(folder, ignore_errors=True)  # of another user: stays


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # of another user
    return True


def server_settings(settings: Settings) -> dict[str, Any]:
    """Return settings of the web server."""
    middleware = [
        Middleware(admission.CSPMiddleware, policy=POLICY),
        Middleware(VisitorMiddleware, settings=settings),
    ]
    return {
        "middleware": middleware,
        "docs_url": None,
        "redoc_url": None,
        "openapi_url": None,
    }


class VisitorMiddleware:
    """Refuses pages of other sites, guessed passwords and uploads without end."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = settings.hosts
        self._logins = admission.guess_limiter(settings.limits)

        # Uploads are written to disk before anybody has asked for a prediction.
        most = settings.limits.upload_bytes
        refusal = f"more than {most:,} bytes uploaded within an hour; wait"
        self._uploads = RateLimiter(most / 3600, most, refusal)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = admission.client_address(scope)
        path = scope["path"].rstrip("/")

        async def counted() -> Message:
            """Receive a part of the body, and count its bytes."""
            message = await receive()
            self._uploads.take(address, cost=len(message.get("body", b"")))
            return message

        try:
            check_origin(Headers(scope=scope), self._hosts)
            if path.endswith("/login"):
                self._logins.take(address)
        except ServiceError as error:
            await admission.problem_response(error)(scope, receive, send)
            return
        is_upload = path.endswith("/upload")
        await self._app(scope, counted if is_upload else receive, send)


def token_auth(tokens: Tokens) -> Callable[[str, str], bool]:
    """Admit who knows a token, under any name."""

    def admits(name: str, password: str) -> bool:
        del name
        try:
            tokens.owner(f"Bearer {password}")
        except ServiceError:
            return False
        return True

    return admits
