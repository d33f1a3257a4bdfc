"""``cliquetta serve``: the HTTP service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cliquetta.cli.command import Common
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
    list[str] | None, typer.Option("--method", help="Method to offer (repeatable). (default: all)")
]
Host = Annotated[str, "Address to listen on."]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]
TokenFile = Annotated[
    Path | None, f"File of accepted tokens, one per line; or set {TOKEN_VARIABLE}."
]
LimitPairs = Annotated[
    list[str] | None,
    typer.Option("--limit", help="Set a limit: NAME=VALUE (repeatable); see docs/serving.md."),
]

SERVE = """
cliquetta serve
cliquetta serve --model micro --model b16=/models/ViT-B-16.pt --state-dir sessions
cliquetta serve --host 0.0.0.0 --token-file tokens.txt --limit images=64 --limit rate=10
cliquetta serve --ray auto --replicas 2:8 --state-dir s3://bucket/sessions
"""
APP = """
cliquetta app
cliquetta app --model micro --model b16=/models/ViT-B-16.pt --open
cliquetta app --host 0.0.0.0 --token-file tokens.txt --limit images=64
"""
_APP_BODY_BYTES = 128 * 2**20
"""Several photographs per batch; the service's default fits fewer."""


def serve(
    common: Common,
    state_dir: Annotated[
        str, "Directory of the sessions; with --ray also s3:// or gs://."
    ] = "sessions",
    model: Models = None,
    method: Methods = None,
    host: Host = "127.0.0.1",
    port: Port = 8765,
    token_file: TokenFile = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sessions that compute at one time. (default: one per core; per replica: one)",
        ),
    ] = None,
    session_days: Annotated[
        float | None,
        typer.Option(min=0, help="Delete sessions unused for N days. [default: never]"),
    ] = None,
    log_format: Annotated[
        str, "text, or json: one object per line, every request included."
    ] = "text",
    traces: Annotated[bool, "Send OpenTelemetry traces to OTEL_EXPORTER_OTLP_ENDPOINT."] = False,
    ray: Annotated[
        str | None, "Serve with replicas on a Ray cluster: its address, auto, or local."
    ] = None,
    replicas: Annotated[str, "With --ray: N, or MIN:MAX by the number of waiting requests."] = "2",
    ray_gpus: Annotated[
        float | None, typer.Option(min=0, help="With --ray: share of a GPU for each replica.")
    ] = None,
    limit: LimitPairs = None,
) -> None:
    """Serve predictions that adapt to each client, over HTTP."""
    try:
        from cliquetta.serve import server
    except ImportError as error:
        raise UserError(f"no {error.name}: pip install 'cliquetta[serve]'") from error

    from cliquetta.data.remote import is_url
    from cliquetta.serve.logs import FORMATS

    if log_format not in FORMATS:
        raise UnknownNameError("log format", log_format, FORMATS)
    from cliquetta.serve.tracing import Tracing, open_tracing

    if ray is None and (ray_gpus is not None or replicas != "2" or is_url(state_dir)):
        raise UserError("--replicas, --ray-gpus and a URL as --state-dir are for --ray")
    settings = offered(common, method, host, token_file, limit, workers, session_days, ray=ray)
    said = f"http://{host}:{port}, sessions in {state_dir}; press Ctrl-C to stop"
    # a line of the log, which standard output may be part of, is JSON as well
    tell = common.terminal.say if log_format == "text" else getLogger("cliquetta.serve").info
    ready = partial(tell, said)
    where: Any = {"host": host, "port": port, "log_format": log_format, "on_ready": ready}
    sources = name_models(model)
    if ray is None:
        settings = with_models(common, settings, sources)
        settings = replace(settings, tracing=open_tracing(traces))
        server.serve(settings, Path(state_dir), **where)
        return

    from cliquetta.serve.replicas import ReplicaPlan, build_settings, serve_replicas

    least, _, most = replicas.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal()):
        raise UserError(f"--replicas is N or MIN:MAX, got {replicas!r}")
    if ":" in common.device:
        wanted = f"write --device cuda, not {common.device}"
        raise UserError(f"the cluster chooses which GPU a replica gets: {wanted}")
    cores = settings.workers * settings.threads
    gpus = 0.0 if common.device == "cpu" else ray_gpus
    plan = ReplicaPlan(int(least), int(most or least), cpus=cores, gpus=gpus, address=ray)
    # tokens stay with the router
    plain = replace(settings, tokens=None, hosts=frozenset(), tracing=Tracing())
    build = partial(build_settings, plain, sources, common.device, common.dtype, traces)
    settings = replace(settings, tracing=open_tracing(traces))
    serve_replicas(settings, build, state_dir, plan, **where)


def name_models(model: list[str] | None) -> dict[str, str]:
    """Public name and source of each model to offer."""
    from cliquetta.serve import settings as known

    return known.name_models(model or ["micro"])


def with_models(common: Common, settings: Settings, sources: Mapping[str, str]) -> Settings:
    """Load the models in this process."""
    from cliquetta.serve.settings import load_models

    return replace(settings, models=load_models(sources, common.model))


def offered(
    common: Common,
    method: list[str] | None,
    host: str,
    token_file: Path | None,
    limit: list[str] | None,
    workers: int | None = None,
    session_days: float | None = None,
    ray: str | None = None,
) -> Settings:
    """Read what the operator offers, checked before a model is loaded."""
    from cliquetta.serve import settings as known
    from cliquetta.serve.auth import check_binding

    tokens = read_tokens(token_file)
    check_binding(host, tokens)
    limits = known.Limits.from_text(read_settings(limit or []))
    methods = known.served_methods(method)
    return known.Settings(
        methods=methods,
        tokens=tokens,
        hosts=known.LOCAL_HOSTS | {host} if tokens is None else None,
        limits=limits,
        workers=workers or (1 if ray else os.cpu_count()) or 1,
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
    """Try methods in a browser, on bundled or on your own images."""
    try:
        from cliquetta.app import interface, server
    except ImportError as error:
        raise UserError(f"no {error.name}: pip install 'cliquetta[app]'") from error
    del interface

    limits = [f"body_bytes={_APP_BODY_BYTES}", *(limit or [])]
    settings = offered(common, method, host, token_file, limits)
    settings = with_models(common, settings, name_models(model))
    ready = partial(common.terminal.say, f"http://{host}:{port}; press Ctrl-C to stop")
    server.serve(settings, host=host, port=port, open_browser=open_browser, on_ready=ready)
