"""OpenTelemetry traces: one request, its spans below each other, nothing about the client."""

import hashlib
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cliquetta.serve.settings import Limits
from cliquetta.serve.tracing import Tracing
from tests._helpers.running import Run
from tests._helpers.serve_setup import CLASSES, Local, batch_of, full_disk
from tests.serve.conftest import Serve, traced

TOKEN = "secret-0123456789abcdef"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
BATCHES = "POST /v1/sessions/{session}/batches"


def test_spans_of_a_batch(serve: Serve) -> None:
    exporter = InMemorySpanExporter()
    with serve(tracing=traced(exporter)) as service:
        session = service.create()
        exporter.clear()
        service.http.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
        service.predict(session, batch_of(0, 3))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {BATCHES, "queue", "predict", "store.write"}
    request = spans.pop(BATCHES)
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert request.kind == SpanKind.SERVER
    assert request.attributes["http.response.status_code"] == 200
    for span in spans.values():
        assert span.parent.span_id == request.context.span_id
        assert (
            request.start_time <= span.start_time <= span.end_time <= request.end_time
        )
    assert spans["queue"].end_time <= spans["predict"].start_time
    assert spans["predict"].end_time <= spans["store.write"].start_time
    assert spans["predict"].attributes["cliquetta.images"] == 3
    hashed = hashlib.sha256(session.encode()).hexdigest()[:16]
    assert {s.attributes["cliquetta.session"] for s in (request, *spans.values())} == {
        hashed
    }


def test_spans_hold_nothing_of_a_client(serve: Serve) -> None:
    exporter = InMemorySpanExporter()
    with serve(tracing=traced(exporter), tokens=[TOKEN]) as service:
        service.http.headers["Authorization"] = f"Bearer {TOKEN}"
        session = service.create()
        service.send(session, batch_of(0))
        service.send(session, [b"secret.png is no image"])
        service.http.get("/v1/sessions/secret-id?token=secret")
        assert service.post("secret").status_code == 422
    spans = exporter.get_finished_spans()
    text = " ".join(span.to_json() for span in spans)
    assert len(spans) > 10
    assert not [
        word for word in ("secret", session, *CLASSES, "Bearer") if word in text
    ]


def test_a_refusal_ends_wait_and_span(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    with serve(tracing=traced(exporter)) as service:
        session = service.create()
        exporter.clear()
        with full_disk(service):
            assert service.send(session, batch_of(0)).status_code == 503
        monkeypatch.setattr(service.service.pool, "_limits", Limits(wait_seconds=1e-9))
        assert service.send(session, batch_of(0)).status_code == 503
    spans = exporter.get_finished_spans()
    (write,) = (span for span in spans if span.name == "store.write")
    assert write.status.status_code == StatusCode.ERROR and not write.events
    assert (
        write.attributes["error.type"] == "UnavailableError"
        and "secret" not in write.to_json()
    )
    requests = [span for span in spans if span.name == BATCHES]
    assert {span.status.status_code for span in requests} == {StatusCode.ERROR}
    assert [span.name for span in spans].count(
        "queue"
    ) == 2  # also of one that waited too long


def test_traces_reach_a_collector(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(
                (self.path, self.rfile.read(int(self.headers["Content-Length"])))
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}"
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    tracing = Tracing.open(traces=True)
    with serve(tracing=tracing) as service:
        service.create()
    tracing.close()
    server.shutdown()
    server.server_close()
    names = []
    for path, body in received:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service_name = {
                a.key: a.value.string_value for a in resource.resource.attributes
            }
            assert service_name["service.name"] == "cliquetta"
            names += [
                span.name for scope in resource.scope_spans for span in scope.spans
            ]
    assert sorted(names) == ["POST /v1/sessions", "queue", "store.write"]


def test_without_the_extra(
    service: Local, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.create()  # the default service has no tracer
    for name in (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry.sdk",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    assert run("serve", "--model", "micro", "--traces").refuses("cliquetta[otel]")
    ours = [
        module for name, module in sys.modules.items() if name.startswith("cliquetta")
    ]
    assert ours and not any("opentelemetry" in vars(module) for module in ours)
