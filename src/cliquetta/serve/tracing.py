"""OpenTelemetry traces of requests (extra ``otel``); without a tracer nothing of it is imported.

Sessions are named by a hash; tokens, names of classes and files, and messages are never
sent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cliquetta import __version__
from cliquetta.errors import UserError


class Tracing:
    """Makes spans with a tracer of OpenTelemetry, or none at all."""

    def __init__(self, tracer: Any = None, provider: Any = None) -> None:
        """Trace with ``tracer``; ``provider``, if given, is flushed by :meth:`close`."""
        self._tracer = tracer
        self._provider = provider

    @classmethod
    def open(cls, traces: bool) -> Tracing:
        """Traces that go where the standard variables say (``OTEL_EXPORTER_OTLP_ENDPOINT``)."""
        if not traces:
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise UserError(
                f"no {error.name}: pip install 'cliquetta[otel]'"
            ) from error

        name = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "cliquetta")}
        provider = TracerProvider(
            resource=Resource.create({**name, "service.version": __version__}),
            shutdown_on_exit=False,  # by close
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider.get_tracer("cliquetta", __version__), provider)

    @contextmanager
    def request(self, headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """The span of a request; yields a dictionary for its ``name`` and attributes."""
        known: dict[str, Any] = {}
        if self._tracer is None:
            yield known
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import (
            TraceContextTextMapPropagator,
        )

        sender = TraceContextTextMapPropagator().extract(dict(headers))
        with self._open("request", context=sender, kind=SpanKind.SERVER) as span:
            try:
                yield known
            finally:
                span.update_name(known.pop("name", "request"))
                if known.get("http.response.status_code", 0) >= 500:
                    span.set_status(StatusCode.ERROR)
                span.set_attributes(_attributes(known))

    @contextmanager
    def span(self, name: str, **known: Any) -> Iterator[None]:
        """A span below the present one; ``session`` is hashed, the rest are attributes."""
        if self._tracer is None:
            yield
            return
        with self._open(name, attributes=_attributes(known)):
            yield

    def start(self, name: str, **known: Any) -> Any:
        """A span below the present one that some other thread ends; see :meth:`end`."""
        if self._tracer is None:
            return None
        return self._tracer.start_span(name, attributes=_attributes(known))

    @staticmethod
    def end(span: Any) -> None:
        """End a span of :meth:`start`; a second time changes nothing."""
        if span is not None and span.is_recording():
            span.end()

    def close(self) -> None:
        """Send what was not sent yet."""
        if self._provider is not None:
            self._provider.shutdown()

    @contextmanager
    def _open(self, name: str, **how: Any) -> Iterator[Any]:
        from opentelemetry.trace import StatusCode

        # not OpenTelemetry's own record of an exception: its message may hold words of
        # a client
        quiet = {"record_exception": False, "set_status_on_exception": False}
        with self._tracer.start_as_current_span(name, **quiet, **how) as span:
            try:
                yield span
            except BaseException as error:
                span.set_status(StatusCode.ERROR)
                span.set_attribute(
                    "error.type", getattr(error, "code", type(error).__name__)
                )
                raise


def _attributes(known: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a span: ours in a namespace of their own, a session's id as a hash."""
    given = {key: value for key, value in known.items() if value is not None}
    if "session" in given:
        given["session"] = hashlib.sha256(given["session"].encode()).hexdigest()[:16]
    return {
        key if "." in key else f"cliquetta.{key}": value for key, value in given.items()
    }
