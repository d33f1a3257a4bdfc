"""Metrics, and the dashboard that reads them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cliquetta.serve.database import UnavailableError
from cliquetta.serve.metrics import ServiceMetrics
from cliquetta.serve.session_store import SessionStore
from cliquetta.types import Prediction
from tests._helpers.serve_setup import Local, batch_of
from tests._helpers.tolerance import LOGIT

ROOT = Path(__file__).parents[2]


def test_the_dashboard_reads_metrics_that_exist(service: Local) -> None:
    session = service.create()
    service.predict(session, batch_of(0), sequence=1)
    service.send(session, batch_of(1), sequence=9)
    dashboard = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
    asked = [
        target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    ]
    used = {
        name
        for expression in asked
        for name in re.findall(r"cliquetta_\w+", expression)
    }
    text = service.http.get("/metrics").text
    known = set(re.findall(r"^(cliquetta_\w+?)(?:\{| )", text, re.M))
    assert used <= known and len(used) > 15
    labels = {
        label
        for expression in asked
        for label in re.findall(r"by \((.*?)\)", expression)
    }
    for label in {part.strip() for group in labels for part in group.split(",")}:
        assert f'{label}="' in text


def test_refusals_are_counted_by_code_and_labels_are_bounded(service: Local) -> None:
    session = service.create()
    service.send(session, batch_of(0), sequence=9)
    for name in ("a", "b", "c"):
        service.http.get(f"/v1/sessions/{name}")
        service.http.get(f"/{name}")
        service.http.request(f"X{name}", "/v1/models")
    service.http.get("/v1/models", headers={"Origin": "http://evil.org"})
    for code, count in (("out_of_order", 1), ("not_found", 6), ("forbidden", 1)):
        assert service.metric(f'cliquetta_refusals_total{{code="{code}"}}') == count
    assert service.metric("cliquetta_wait_seconds_count") > 0
    text = service.http.get("/metrics").text
    assert session not in text and '"/a"' not in text and "evil" not in text


def test_health_of_adaptation() -> None:
    metrics = ServiceMetrics()
    logits = torch.tensor([[9.0, 0.0], [9.0, 0.0]])
    evidence: dict[str, Any] = {
        "changed": torch.tensor(0.5),
        "loss": torch.tensor([1.0, 3.0]),
    }
    evidence |= {
        "domain": 2,
        "verdict": "adapt",
        "bad": float("nan"),
        "grid": torch.zeros(3, 3),
    }
    metrics.observe_health("m", Prediction(logits, evidence))
    metrics.observe_health("m", Prediction(torch.zeros(0, 2)))
    text = metrics.render().decode()
    samples = re.findall(
        r'^cliquetta_(\w+)\{method="m"(?:,name="(\w+)")?\} (\S+)$', text, re.M
    )
    shown = {(metric, name): float(value) for metric, name, value in samples}
    p = logits.softmax(-1)[0]
    bits = float(-(p * p.log2()).sum())  # by that of two even classes: 1 bit
    assert shown["confidence_sum", ""] == pytest.approx(float(p[0]))
    assert shown["evenness_sum", ""] == pytest.approx(bits, rel=LOGIT)
    means = {
        name: value for (metric, name), value in shown.items() if metric == "evidence"
    }
    assert means == {"changed": 0.5, "loss": 2.0, "domain": 2.0}
    metrics.observe_health("m", Prediction(logits, {f"x{i}": i for i in range(500)}))
    assert len(re.findall("cliquetta_evidence{", metrics.render().decode())) <= 64


def test_sizes_of_the_database_and_of_its_largest_sessions(service: Local) -> None:
    small = service.create("zero_shot")
    large = service.create("tent")
    for session in (small, large):
        service.predict(session, batch_of(0))
    text = service.http.get("/metrics").text
    largest = re.findall(
        r'^cliquetta_largest_session_bytes{rank="(\d)"} (\S+)$', text, re.M
    )
    stored = service.service.sessions._store.find(large)
    assert stored is not None and stored.bytes > 4_000
    assert [(rank, float(number)) for rank, number in largest] == [
        ("1", stored.bytes),
        ("2", 0),
    ]
    assert service.metric("cliquetta_sessions ") == 2
    assert service.metric("cliquetta_database_bytes ") > stored.bytes


def test_metrics_without_a_database_that_responds(
    service: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: SessionStore) -> None:
        raise UnavailableError("the database cannot be reached", "start it")

    monkeypatch.setattr(SessionStore, "size", fail)
    response = service.http.get("/metrics")
    assert response.status_code == 200
    assert "cliquetta_database_bytes NaN" in response.text
