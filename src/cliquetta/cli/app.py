"""``cliquetta app``: try it in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cliquetta.cli.command import Common, command
from cliquetta.cli.inputs import read_settings
from cliquetta.cli.serve import TOKEN_VARIABLE, read_tokens
from cliquetta.errors import UserError

_EXAMPLES = """
cliquetta app

cliquetta app --model micro --model b16=/models/ViT-B-16.pt --open

cliquetta app --host 0.0.0.0 --token-file tokens.txt --limit images=64
"""


def add_to(app: typer.Typer) -> None:
    """Enter the command."""
    command(app, "app", examples=_EXAMPLES)(show)


def show(
    common: Common,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model to choose from, micro if none; NAME=PATH. Repeat."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A method to choose from, all if none. Repeat."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 7860,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"Tokens that are let in, one a line; or set {TOKEN_VARIABLE}."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of a limit (docs/app.md). Repeat."),
    ] = None,
) -> None:
    """Try methods in a browser, on the bundled stream or on your own images."""
    try:
        from cliquetta.app import interface
    except ImportError as error:
        raise UserError(f"no {error.name}: pip install 'cliquetta[app]'") from error
    from cliquetta.app.desk import Desk
    from cliquetta.app.session import app_limits
    from cliquetta.serve.auth import check_binding
    from cliquetta.serve.factory import served_methods
    from cliquetta.serve.server import load_models, name_models

    tokens = read_tokens(token_file)
    check_binding(host, tokens)
    limits = app_limits(read_settings(limit or []))
    methods = served_methods(method)
    models = load_models(name_models(model or ["micro"]), common.model)
    common.terminal.say(f"http://{host}:{port}; Ctrl-C stops it")
    interface.serve(
        lambda folder: Desk(models, methods, limits, folder),
        host=host,
        port=port,
        tokens=tokens,
        open_browser=open_browser,
    )
