"""``cliquetta serve``: the HTTP service."""

import os
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cliquetta.cli.checks import check_file, check_methods, check_model
from cliquetta.cli.command import Bounds, Common, read_settings
from cliquetta.errors import UnknownNameError, UserError
from cliquetta.model.names import NO_MODEL
from cliquetta.serve.logs import FORMATS

if TYPE_CHECKING:
    from cliquetta.serve.settings import Settings

TOKEN_VARIABLE = "CLIQUETTA_TOKEN"

Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="Model to offer: NAME or NAME=PATH (repeatable)."),
]
Methods = Annotated[
    list[str] | None,
    typer.Option("--method", help="Method to offer (repeatable). (default: all)"),
]
Host = Annotated[str, "Address to listen on."]
Port = Annotated[int, Bounds(1, 65535), "Port to listen on."]
TokenFile = Annotated[
    Path | None, f"File of accepted tokens, one per line; or set {TOKEN_VARIABLE}."
]
LimitPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--limit", help="Set a limit: NAME=VALUE (repeatable); see docs/serving.md."
    ),
]

SERVE = """
cliquetta serve --model ViT-B/16
cliquetta serve --model micro --model b16=/models/ViT-B-16.pt --sessions /var/lib/cliquetta
cliquetta serve --model micro --host 0.0.0.0 --token-file tokens.txt --limit images=64
cliquetta serve --model ViT-B/16 --sessions postgresql+psycopg://user@host/cliquetta
cliquetta serve --model ViT-B/16 --ray auto --replicas 2:8 \
    --sessions postgresql+psycopg://user@host/cliquetta
"""
APP = """
cliquetta app --model micro
cliquetta app --model micro --model b16=/models/ViT-B-16.pt --open
cliquetta app --model micro --host 0.0.0.0 --token-file tokens.txt --limit images=64
"""
_APP_BODY_BYTES = 128 * 2**20
"""Room for several photographs per batch; the service's default fits fewer."""


def serve(
    common: Common,
    sessions: Annotated[
        str,
        typer.Option(
            envvar="CLIQUETTA_SESSIONS",
            help="Folder of the sessions (SQLite), or URL of a PostgreSQL database.",
        ),
    ] = "sessions",
    model: Models = None,
    method: Methods = None,
    host: Host = "127.0.0.1",
    port: Port = 8765,
    token_file: TokenFile = None,
    workers: Annotated[
        int | None,
        Bounds(1),
        "Sessions that compute at one time. (default: one per core; per replica: one)",
    ] = None,
    session_days: Annotated[
        float | None, Bounds(0), "Delete sessions unused for N days. [default: never]"
    ] = None,
    log_format: Annotated[
        str, "text, or json: one object per line, every request included."
    ] = "text",
    traces: Annotated[
        bool, "Send OpenTelemetry traces to OTEL_EXPORTER_OTLP_ENDPOINT."
    ] = False,
    ray: Annotated[
        str | None, "Serve with replicas on a Ray cluster: its address, auto, or local."
    ] = None,
    replicas: Annotated[
        str, "With --ray: N, or MIN:MAX by the number of waiting requests."
    ] = "2",
    ray_gpus: Annotated[
        float | None, Bounds(0), "With --ray: share of a GPU for each replica."
    ] = None,
    limit: LimitPairs = None,
) -> None:
    """Serve predictions that adapt to each client, over HTTP."""
    check_offer(model, method, token_file)
    if log_format not in FORMATS:
        raise UnknownNameError("log format", log_format, FORMATS)
    if ray is None and (ray_gpus is not None or replicas != "2"):
        raise UserError("--replicas and --ray-gpus are for --ray")
    try:
        from cliquetta.serve import server
    except ImportError as error:
        raise UserError(f"no {error.name}: pip install 'cliquetta[serve]'") from error

    from cliquetta.serve.database import shown_name
    from cliquetta.serve.settings import load_models, name_models
    from cliquetta.serve.tracing import Tracing

    settings = read_offer(common, method, host, token_file, limit)
    workers = workers or (1 if ray else os.cpu_count()) or 1
    settings = replace(settings, workers=workers, session_days=session_days)
    name = shown_name(sessions)
    sentence = f"http://{host}:{port}, sessions in {name}; press Ctrl-C to stop"
    ready = partial(common.terminal.say, sentence)
    if log_format != "text":
        # Standard output may be part of the log, whose lines are JSON.
        ready = partial(getLogger("cliquetta.serve").info, sentence)
    sources = name_models(model or ())
    if ray is None:
        models = load_models(sources, common.model)
        server.serve(
            replace(settings, models=models, tracing=Tracing.open(traces)),
            sessions,
            host=host,
            port=port,
            log_format=log_format,
            on_ready=ready,
        )
        return

    from cliquetta.serve.ray_deployment import ReplicaBuild, ReplicaPlan, serve_replicas

    if ":" in common.device:
        remedy = f"write --device cuda, not {common.device}"
        raise UserError(f"the cluster chooses which GPU a replica gets: {remedy}")
    build = ReplicaBuild(
        settings=settings,
        sources=sources,
        sessions=sessions,
        device=common.device,
        dtype=common.dtype,
        traces=traces,
        log_format=log_format,
    )
    least, most = _read_replicas(replicas)
    plan = ReplicaPlan(
        least=least,
        most=most,
        cpus=settings.workers * settings.threads,
        gpus=0.0 if common.device == "cpu" else ray_gpus,
        address=ray,
    )
    serve_replicas(build, plan, host=host, port=port, on_ready=ready)


def _read_replicas(given: str) -> tuple[int, int]:
    """Read the least and the largest number of replicas."""
    least, _, most = given.partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal()):
        raise UserError(f"--replicas is N or MIN:MAX, got {given!r}")
    return int(least), int(most)


def check_offer(
    model: list[str] | None, method: list[str] | None, token_file: Path | None
) -> None:
    """Raise a :class:`UserError` for misspelt names, or where no model is named."""
    if not model:
        raise UserError(NO_MODEL)
    for offered in model:
        name, equals, source = offered.partition("=")
        if not name or (equals and not source):
            raise UserError(f"a model is NAME or NAME=PATH, got {offered!r}")
        check_model(source or name)
    for name in method or ():
        check_methods(name)
    check_file(token_file, "--token-file")


def read_offer(
    common: Common,
    method: list[str] | None,
    host: str,
    token_file: Path | None,
    limit: list[str] | None,
) -> "Settings":
    """Read what the operator offers, checked before a model is loaded.

    Tokens are in a file or in the environment: a command line would show them to
        everyone.
    """
    from cliquetta.serve.auth import Tokens, check_binding
    from cliquetta.serve.settings import LOCAL_HOSTS, Limits, Settings, served_methods

    tokens = None
    if token_file is not None:
        tokens = Tokens(token_file.read_text(encoding="utf-8").splitlines())
    elif TOKEN_VARIABLE in os.environ:
        tokens = Tokens([os.environ[TOKEN_VARIABLE]])
    check_binding(host, tokens)
    return Settings(
        methods=served_methods(method),
        tokens=tokens,
        hosts=LOCAL_HOSTS | {host} if tokens is None else None,
        limits=Limits.from_text(read_settings(limit or [])),
        threads=common.threads or 1,
    )


def show(
    common: Common,
    model: Models = None,
    method: Methods = None,
    host: Host = "127.0.0.1",
    port: Port = 7860,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open it in a browser.")
    ] = False,
    token_file: TokenFile = None,
    limit: LimitPairs = None,
) -> None:
    """Try methods in a browser, on bundled or on your own images."""
    check_offer(model, method, token_file)
    try:
        from cliquetta.app import interface, server
    except ImportError as error:
        raise UserError(f"no {error.name}: pip install 'cliquetta[app]'") from error
    del interface
    from cliquetta.serve.settings import load_models, name_models

    limits = [f"body_bytes={_APP_BODY_BYTES}", *(limit or [])]
    settings = read_offer(common, method, host, token_file, limits)
    models = load_models(name_models(model or ()), common.model)
    settings = replace(settings, models=models)
    ready = partial(common.terminal.say, f"http://{host}:{port}; press Ctrl-C to stop")
    server.serve(
        settings, host=host, port=port, open_browser=open_browser, on_ready=ready
    )
