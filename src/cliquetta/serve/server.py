"""Start the service: models loaded, the store locked, the port opened."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import uvicorn

from cliquetta.errors import UserError
from cliquetta.model.clip import CLIP
from cliquetta.serve.asgi import create_app
from cliquetta.serve.auth import check_binding
from cliquetta.serve.service import Settings
from cliquetta.serve.store import Store


def name_models(given: Sequence[str]) -> dict[str, str]:
    """Public name and source of each model: ``micro``, or ``NAME=SOURCE`` to hide a path."""
    sources: dict[str, str] = {}
    for value in given:
        name, equals, source = value.partition("=")
        if not name or (equals and not source):
            raise UserError(f"a model is NAME or NAME=PATH, got {value!r}")
        if name in sources:
            raise UserError(f"two models are named {name!r}")
        sources[name] = source or name
    return sources


def load_models(sources: Mapping[str, str], load: Callable[[str], CLIP]) -> dict[str, CLIP]:
    """``load`` every model once, whatever the number of names it has."""
    loaded: dict[str, CLIP] = {}
    for source in sources.values():
        if source not in loaded:
            loaded[source] = make_shareable(load(source))
    return {name: loaded[source] for name, source in sources.items()}


def make_shareable(model: CLIP) -> CLIP:
    """Compute what a model keeps for later now, before several threads may do so at once."""
    model.requires_grad_(False).eval()
    _ = model.fingerprint
    if model.text is not None:
        _ = model.tokenizer
    return model


def serve(settings: Settings, folder: Path | str, *, host: str, port: int) -> None:
    """Serve until the process is told to stop; what was answered is in ``folder``."""
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
