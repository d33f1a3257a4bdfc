"""Start the service: the store locked, the port opened."""

from __future__ import annotations

import warnings
from pathlib import Path

import uvicorn

from cliquetta.serve.asgi import create_app
from cliquetta.serve.auth import check_binding
from cliquetta.serve.settings import Settings
from cliquetta.serve.store import Store


def serve(settings: Settings, folder: Path | str, *, host: str, port: int) -> None:
    """Serve until the process is stopped; every acknowledged answer is in ``folder``."""
    check_binding(host, settings.tokens)
    # Python remembers every different warning, and a client's file can make any number of them.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with Store.open(folder) as store:
        uvicorn.run(
            create_app(store, settings),
            host=host,
            port=port,
            access_log=False,
            server_header=False,
            log_level="warning",
            timeout_graceful_shutdown=30,
        )
