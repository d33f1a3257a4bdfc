"""The router in front of replicas: lost requests are sent again and count once, in order."""

import asyncio
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.metrics_core import Metric
from starlette.testclient import TestClient

from cliquetta.model.clip import CLIP
from cliquetta.serve.asgi import create_app
from cliquetta.serve.auth import Tokens
from cliquetta.serve.router import Forwarded, LostError, Reply, create_router, run_app
from cliquetta.serve.settings import Settings
from cliquetta.serve.store import Store
from tests._helpers.serve_setup import (
    ALICE,
    CLASSES,
    Alone,
    Local,
    batch_of,
    make_settings,
    probabilities,
    refusal,
)
from tests.serve.conftest import traced

Fault = Callable[[Forwarded], str]
"""The moment a request is lost: ``before`` or ``after`` it is applied, or never."""


class Routed(Local):
    """Two replicas in this process behind a router; every request goes to another one."""

    def __init__(self, folder: Path, router: Settings) -> None:
        how = replace(router, tokens=None, hosts=frozenset())
        self.apps = [create_app(Store(folder), how, admitted=True) for _ in range(2)]
        self.asked: list[Forwarded] = []
        self.fault: Fault = lambda request: ""
        app = create_router(replace(router, models={}), self._ask, self._watch)
        self.http = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    async def _ask(self, session: str, request: Forwarded) -> Reply:
        del session
        self.asked.append(request)
        app, fault = self.apps[len(self.asked) % 2], self.fault(request)
        if fault == "before":
            raise LostError
        response = await run_app(app, request)
        if fault == "after":
            raise LostError
        return response

    async def _watch(self) -> dict[str, list[Metric]]:
        return {f"r{i}": app.state.service.metrics.collect() for i, app in enumerate(self.apps)}


Route = Callable[..., AbstractContextManager[Routed]]


@pytest.fixture
def route(tmp_path: Path, tiny_clip: CLIP) -> Route:
    """``with route(**settings) as service``: two replicas on the test's folder."""

    @contextmanager
    def build(**settings: Any) -> Iterator[Routed]:
        service = Routed(tmp_path, make_settings(tiny_clip, **settings))
        with service.http:
            yield service
        for app in service.apps:
            app.state.service.pool.close()

    return build


def test_lost_requests(route: Route, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cliquetta.serve.router._LONGEST_PAUSE", 0.01)
    draw = random.Random(0)
    with route() as service:
        service.fault = lambda request: draw.choice(["", "before", "after"])
        session = service.create()
        for number in range(8):
            given = {"sequence": number + 1} if number % 2 else {}
            response = service.check(session, batch_of(number), alone, **given)
            assert response["sequence"] == number + 1
        lost = len(service.asked) - 9
        assert lost >= 4 and service.metric("cliquetta_resent_total{") == lost
        assert len(service.ids()) == 1
        faults = iter(["after", "after", ""])
        service.fault = lambda request: next(faults)
        assert service.http.delete(f"/v1/sessions/{session}").status_code == 204
        service.fault = lambda request: ""
        assert service.http.delete(f"/v1/sessions/{session}").status_code == 404


def test_requests_of_a_session_keep_their_order(route: Route, alone: Alone) -> None:
    """Not only of one replica: the second request waits for the first, wherever that is."""
    with route(limits={"queued_per_session": 2}) as service:
        session = service.create()
        asked, go_on = threading.Event(), threading.Event()

        def hold(request: Forwarded) -> str:
            if request.path.endswith("/batches") and not asked.is_set():
                asked.set()
                return "before"
            return ""

        service.fault = hold
        with ThreadPoolExecutor(5) as pool:
            pause = asyncio.sleep

            async def slow(seconds: float) -> None:  # the router's pause before it asks again
                while not go_on.is_set():
                    await pause(0.01)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("cliquetta.serve.router.asyncio.sleep", slow)
                sent = []
                for number in range(3):
                    sent.append(pool.submit(service.predict, session, batch_of(number)))
                    assert asked.wait(30)
                    time.sleep(0.2)
                assert refusal(service.send(session, batch_of(9))) == (429, "session_busy")
                assert service.info(session)["sequence"] == 0  # a look does not wait
                go_on.set()
                responses = [future.result(60) for future in sent]
        for number, response in enumerate(responses):
            assert response["sequence"] == number + 1
            assert probabilities(response) == alone.predict(batch_of(number))


def test_no_replica_in_time_is_a_refusal(route: Route) -> None:
    with route(limits={"wait_seconds": 0.3, "batch_seconds": 0.3}) as service:
        service.fault = lambda request: {}["a defect"]
        failed = service.http.get("/healthz")
        assert failed.status_code == 500 and "incident" in failed.json()["message"]
        service.fault = lambda request: "before"
        refused = service.http.get("/healthz")
        assert refusal(refused) == (503, "out_of_time")
        assert refused.headers["retry-after"] == "5"


def test_the_router_admits(route: Route) -> None:
    with route(tokens=[ALICE], limits={"body_bytes": 5000}) as service:
        assert service.http.get("/v1/models").status_code == 401
        assert service.http.get("/metrics").status_code == 401
        assert service.asked == []
        service.http.headers["Authorization"] = f"Bearer {ALICE}"
        session = service.create()
        assert service.asked[-1].owner == Tokens([ALICE]).owner(f"Bearer {ALICE}")
        assert service.send(session, [b"x" * 6000]).status_code == 413
        assert service.http.get("/v1/sessions?x=%2f").status_code == 200
        assert service.http.get("/docs").headers["content-type"].startswith("text/html")
        assert "SessionRequest" in service.http.get("/openapi.json").text
        assert service.http.request("XYZ", "/v1/models").status_code == 405


def test_metrics_of_all_replicas_are_one_page(route: Route) -> None:
    with route() as service:
        session = service.create()
        for number in range(4):
            service.predict(session, batch_of(number))
        service.http.get("/v1/sessions/none")
        text = service.http.get("/metrics").text
    images = re.findall(r'cliquetta_images_total{replica="(\w*)",result="predicted"} (\S+)', text)
    assert {name: float(value) for name, value in images} == {"r0": 8.0, "r1": 8.0}
    assert len(re.findall("^# TYPE cliquetta_images_total", text, re.M)) == 1
    labels = '{replica="",route="/v1/sessions/{session}/batches",status="200"}'
    assert f"cliquetta_requests_total{labels} 4.0" in text
    assert session not in text


def test_spans_and_words_arrive_unchanged(route: Route) -> None:
    exporter = InMemorySpanExporter()
    with route(tracing=traced(exporter)) as service:
        named = ["Füße", "naïve café", *CLASSES]
        session = service.create("zero_shot", classes=named)
        assert service.info(session)["classes"] == named
        state = service.state(session)
        sent = service.http.put(f"/v1/sessions/{session}/state", content=state)
        assert sent.status_code == 200
        exporter.clear()
        service.predict(session, batch_of(0))
        forwarded = service.asked[-1]
        (request,) = (s for s in exporter.get_finished_spans() if s.name.startswith("POST"))
        assert request.attributes["cliquetta.session"]
        assert f"{request.context.span_id:016x}" in forwarded.trace["traceparent"]
