"""``cliquetta serve``: the HTTP service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cliquetta.cli.command import Common, command
from cliquetta.cli.inputs import read_settings
from cliquetta.errors import UserError

if TYPE_CHECKING:
    from cliquetta.serve.auth import Tokens

TOKEN_VARIABLE = "CLIQUETTA_TOKEN"

_EXAMPLES = """
cliquetta serve

cliquetta serve --model micro --model b16=/models/ViT-B-16.pt --state-dir sessions

cliquetta serve --host 0.0.0.0 --token-file tokens.txt --limit images=64 --limit rate=10
"""


def add_to(app: typer.Typer) -> None:
    """Enter the command."""
    command(app, "serve", examples=_EXAMPLES)(serve)


def serve(
    common: Common,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that clients may name, micro if none; NAME=PATH. Repeat."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A method that clients may name, all if none. Repeat."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8765,
    state_dir: Annotated[Path, typer.Option(help="Where sessions are kept.")] = Path("sessions"),
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"Tokens that are let in, one a line; or set {TOKEN_VARIABLE}."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Sessions worked on at one time; one a core if not given."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of a limit (docs/serving.md). Repeat."),
    ] = None,
) -> None:
    """Serve predictions that adapt to each client, over HTTP."""
    try:
        from cliquetta.serve import server
    except ImportError as error:
        raise UserError(f"no {error.name}: pip install 'cliquetta[serve]'") from error
    from cliquetta.serve.auth import check_binding
    from cliquetta.serve.factory import served_methods
    from cliquetta.serve.limits import Limits
    from cliquetta.serve.service import LOCAL_HOSTS, Settings

    tokens = read_tokens(token_file)
    check_binding(host, tokens)
    limits = Limits.from_text(read_settings(limit or []))
    methods = served_methods(method)
    settings = Settings(
        models=server.load_models(server.name_models(model or ["micro"]), common.model),
        methods=methods,
        tokens=tokens,
        hosts=LOCAL_HOSTS | {host} if tokens is None else None,
        limits=limits,
        workers=workers or os.cpu_count() or 1,
        threads=common.threads or 1,
    )
    common.terminal.say(f"http://{host}:{port}, sessions in {state_dir}; Ctrl-C stops it")
    server.serve(settings, state_dir, host=host, port=port)


def read_tokens(path: Path | None) -> Tokens | None:
    """The tokens of a file or of the environment; a command line would show them to everybody."""
    from cliquetta.serve.auth import Tokens

    if path is not None:
        return Tokens(path.read_text(encoding="utf-8").splitlines())
    given = os.environ.get(TOKEN_VARIABLE)
    return None if given is None else Tokens([given])
