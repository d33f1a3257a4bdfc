"""``cliquetta serve``: the HTTP service."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cliquetta.cli.command import Common, command
from cliquetta.cli.options import read_settings
from cliquetta.errors import UnknownNameError, UserError

if TYPE_CHECKING:
    from cliquetta.serve.auth import Tokens
    from cliquetta.serve.settings import Settings

TOKEN_VARIABLE = "CLIQUETTA_TOKEN"

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="Model to offer: NAME or NAME=PATH (repeatable). (default: micro)"
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option("--method", help="Method to offer (repeatable). (default: all)"),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(help=f"File of accepted tokens, one per line; or set {TOKEN_VARIABLE}."),
]
LimitPairs = Annotated[
    list[str] | None,
    typer.Option("--limit", help="Set a limit: NAME=VALUE (repeatable); see docs/serving.md."),
]

_EXAMPLES = """
cliquetta serve

cliquetta serve --model micro --model b16=/models/ViT-B-16.pt --state-dir sessions

cliquetta serve --host 0.0.0.0 --token-file tokens.txt --limit images=64 --limit rate=10
"""


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(app, "serve", examples=_EXAMPLES)(serve)


def serve(
    common: Common,
    state_dir: Annotated[Path, typer.Option(help="Directory of the sessions.")] = Path("sessions"),
    model: Models = None,
    method: Methods = None,
    host: Host = "127.0.0.1",
    port: Port = 8765,
    token_file: TokenFile = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Sessions that compute at one time. (default: one per core)"),
    ] = None,
    session_days: Annotated[
        float | None,
        typer.Option(min=0, help="Delete sessions not used for so many days. [default: never]"),
    ] = None,
    log_format: Annotated[
        str, typer.Option(help="text, or json: one object per line, every request included.")
    ] = "text",
    traces: Annotated[
        bool,
        typer.Option("--traces", help="Send OpenTelemetry traces to OTEL_EXPORTER_OTLP_ENDPOINT."),
    ] = False,
    limit: LimitPairs = None,
) -> None:
    """Serve predictions that adapt to each client, over HTTP."""
    try:
        from cliquetta.serve import server
    except ImportError as error:
        raise UserError(f"no {error.name}: pip install 'cliquetta[serve]'") from error

    from cliquetta.serve.logs import FORMATS

    if log_format not in FORMATS:
        raise UnknownNameError("log format", log_format, FORMATS)
    from cliquetta.serve.tracing import Tracing

    tracing = Tracing.to_collector() if traces else Tracing()
    settings = offered(common, model, method, host, token_file, limit, workers, session_days)
    settings = replace(settings, tracing=tracing)
    said = f"http://{host}:{port}, sessions in {state_dir}; press Ctrl-C to stop"
    ready = partial(common.terminal.say, said)
    server.serve(settings, state_dir, host=host, port=port, log_format=log_format, on_ready=ready)


def offered(
    common: Common,
    model: list[str] | None,
    method: list[str] | None,
    host: str,
    token_file: Path | None,
    limit: list[str] | None,
    workers: int | None = None,
    session_days: float | None = None,
) -> Settings:
    """What the operator offers, everything checked before a model is loaded."""
    from cliquetta.serve import settings as known
    from cliquetta.serve.auth import check_binding

    tokens = read_tokens(token_file)
    check_binding(host, tokens)
    limits = known.Limits.from_text(read_settings(limit or []))
    methods = known.served_methods(method)
    models = known.load_models(known.name_models(model or ["micro"]), common.model)
    return known.Settings(
        models=models,
        methods=methods,
        tokens=tokens,
        hosts=known.LOCAL_HOSTS | {host} if tokens is None else None,
        limits=limits,
        workers=workers or os.cpu_count() or 1,
        threads=common.threads or 1,
        session_days=session_days,
    )


def read_tokens(path: Path | None) -> Tokens | None:
    """Tokens of a file or of the environment; a command line would show them to everyone."""
    from cliquetta.serve.auth import Tokens

    if path is not None:
        return Tokens(path.read_text(encoding="utf-8").splitlines())
    given = os.environ.get(TOKEN_VARIABLE)
    return None if given is None else Tokens([given])
