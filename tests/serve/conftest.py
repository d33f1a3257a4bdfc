"""A service on the tiny model for every test that asks, and the method alone beside it."""

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

from cliquetta.model.clip import CLIP
from cliquetta.serve.tracing import Tracing
from tests._helpers.postgres import PostgreSQL
from tests._helpers.postgres import postgresql as postgresql
from tests._helpers.running import run as run
from tests._helpers.serve_setup import Alone, Local, live_service, local_service

Serve = Callable[..., AbstractContextManager[Local]]
ServeLive = Callable[..., AbstractContextManager[str]]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of either kind, for the sessions of the test."""
    if request.param == "sqlite":
        return str(tmp_path / "sessions")
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.create_database()


@pytest.fixture
def serve(where: str, tiny_clip: CLIP) -> Serve:
    """``with serve(**settings) as service``: serves the test's sessions; again, after a restart."""
    return partial(local_service, where, tiny_clip)


@pytest.fixture
def serve_live(tmp_path: Path, tiny_clip: CLIP) -> ServeLive:
    """Such a service with SQLite behind a port of this machine, ``as address``."""
    return partial(live_service, tmp_path, tiny_clip)


@pytest.fixture
def service(serve: Serve) -> Iterator[Local]:
    """An empty service without tokens."""
    with serve() as local:
        yield local


@pytest.fixture
def alone(tiny_clip: CLIP) -> Alone:
    """The method that sessions have unless they name another, without any service."""
    return Alone(tiny_clip)


def connect(address: str) -> socket.socket:
    """A connection to a service."""
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def traced(exporter: SpanExporter) -> Tracing:
    """Tracing whose spans go to an exporter."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider.get_tracer("test"))
