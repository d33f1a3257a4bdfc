"""``cliquetta app``: try it in a browser."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from cliquetta.cli.command import Common, command
from cliquetta.cli.serve import (
    Host,
    LimitPairs,
    Methods,
    Models,
    Port,
    TokenFile,
    name_models,
    offered,
    with_models,
)
from cliquetta.errors import UserError

_BODY_BYTES = 128 * 2**20  # several photographs per batch; the service's default fits fewer
_EXAMPLES = """
cliquetta app

cliquetta app --model micro --model b16=/models/ViT-B-16.pt --open

cliquetta app --host 0.0.0.0 --token-file tokens.txt --limit images=64
"""


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(app, "app", examples=_EXAMPLES)(show)


def show(
    common: Common,
    model: Models = None,
    method: Methods = None,
    host: Host = "127.0.0.1",
    port: Port = 7860,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    token_file: TokenFile = None,
    limit: LimitPairs = None,
) -> None:
    """Try methods in a browser, on the bundled stream or on your own images."""
    try:
        from cliquetta.app import interface, server
    except ImportError as error:
        raise UserError(f"no {error.name}: pip install 'cliquetta[app]'") from error
    del interface

    limits = [f"body_bytes={_BODY_BYTES}", *(limit or [])]
    settings = offered(common, method, host, token_file, limits)
    settings = with_models(common, settings, name_models(model))
    ready = partial(common.terminal.say, f"http://{host}:{port}; press Ctrl-C to stop")
    server.serve(settings, host=host, port=port, open_browser=open_browser, on_ready=ready)
