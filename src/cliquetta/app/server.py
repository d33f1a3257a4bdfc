"""Start the web app: who may open it, what a page may reach, where uploads are stored."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from cliquetta.app.desk import Desk
from cliquetta.serve.auth import Tokens, check_binding
from cliquetta.serve.errors import ServiceError
from cliquetta.serve.middleware import CSPMiddleware
from cliquetta.serve.settings import Settings

POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "form-action 'self'; frame-ancestors 'self'; object-src 'none'"
)
"""A page may load nothing from and send nothing to another machine, whatever its scripts try."""


def serve(settings: Settings, *, host: str, port: int, open_browser: bool = False) -> None:
    """Show the app until the process is stopped; nothing is left on disk."""
    check_binding(host, settings.tokens)
    # Python remembers every different warning, and a visitor's file can cause any number of them.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with tempfile.TemporaryDirectory(prefix="cliquetta-app-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = str(Path(folder) / "uploads")
        from cliquetta.app.interface import launch

        launch(
            Desk(settings, Path(folder)),
            host=host,
            port=port,
            open_browser=open_browser,
            auth=None if settings.tokens is None else token_auth(settings.tokens),
            app_kwargs=server_settings(settings.hosts),
        )


def server_settings(hosts: frozenset[str] | None) -> dict[str, Any]:
    """Settings of the web server; ``hosts`` are the names it answers to, ``None`` for any.

    They refuse a foreign page that points a name of its own at this machine.
    """
    middleware = [Middleware(CSPMiddleware, policy=POLICY)]
    if hosts is not None:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=sorted(hosts)))
    return {"middleware": middleware, "docs_url": None, "redoc_url": None, "openapi_url": None}


def token_auth(tokens: Tokens) -> Callable[[str, str], bool]:
    """Admits who knows a token, under any name."""

    def admits(name: str, password: str) -> bool:
        del name
        try:
            tokens.owner(f"Bearer {password}")
        except ServiceError:
            return False
        return True

    return admits
