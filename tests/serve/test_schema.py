"""The OpenAPI document is true: requests made from it never break the service."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests._helpers.serve_setup import CLASSES, Local, batch_of
from tests.serve.conftest import ServeLive

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,"
CHECKS += "response_schema_conformance"


@pytest.mark.slow
def test_schemathesis_finds_nothing(serve_live: ServeLive, tmp_path: Path) -> None:
    with serve_live(limits={"sessions": 20}) as address:
        # a session to work on, as ids cannot be guessed
        session = httpx.post(
            f"{address}/v1/sessions", json={"classes": CLASSES}
        ).json()["id"]
        config = tmp_path / "schemathesis.toml"
        config.write_text(f'[parameters]\n"path.session" = "{session}"\n')
        program = Path(sys.executable).with_name("schemathesis")
        command = [
            str(program),
            "--config-file",
            str(config),
            "run",
            f"{address}/openapi.json",
        ]
        options = f"--checks {CHECKS} --max-examples 25 --seed 1 --no-color".split()
        run = subprocess.run(
            command + options, capture_output=True, text=True, timeout=600, cwd=tmp_path
        )
        assert run.returncode == 0, run.stdout[-6000:]
        assert "Unresolvable" not in run.stdout
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_the_document_names_what_is_served_and_its_examples_work(
    service: Local,
) -> None:
    document = service.http.get("/openapi.json").json()
    session = document["components"]["schemas"]["SessionRequest"]
    assert {"scap", "tent", "zero_shot"} <= set(session["properties"]["method"]["enum"])
    assert (
        "coop" not in session["properties"]["method"]["enum"]
    )  # needs labelled images
    assert session["properties"]["model"]["enum"] == ["tiny", None]
    made = service.http.post("/v1/sessions", json=session["examples"][0])
    assert made.status_code == 201
    path = f"/v1/sessions/{made.json()['id']}/batches"
    batch = document["paths"]["/v1/sessions/{session}/batches"]["post"]["requestBody"][
        "content"
    ]
    response = service.http.post(path, json=batch["application/json"]["example"])
    assert len(response.json()["predictions"]) == 1


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 422),
        (b"[" * 100_000, "application/json", 422),
        (b'{"images": [{"data": "\\ud800"}]}', "application/json", 422),
        (b'{"images": [{"data": "?!"}]}', "application/json", 422),
        (b'{"images": []}', "application/json", 422),
        (
            b'{"images": [{"data": "data:text/plain;base64,eA=="}]}',
            "application/json",
            422,
        ),
        (b'{"images": [{"data": ""}], "sequence": 1e400}', "application/json", 422),
        (b"x", "text/plain", 415),
        (b"x", "multipart/form-data", 400),
        (b"--b\r\n", "multipart/form-data; boundary=b", 422),
        (b"", "", 415),
    ],
)
def test_unparsable_batches(
    service: Local, content: bytes, kind: str, status: int
) -> None:
    session = service.create()
    headers = {"Content-Type": kind}
    path = f"/v1/sessions/{session}/batches"
    refused = service.http.post(path, content=content, headers=headers)
    assert refused.status_code == status, refused.text
    assert set(refused.json()) == {"code", "message"}


def test_odd_names_come_back_harmless(service: Local) -> None:
    request = b'{"classes": ["a"], "method": "tent", "\\ud800": 1}'
    headers = {"Content-Type": "application/json"}
    refused = service.http.post("/v1/sessions", content=request, headers=headers)
    assert refused.status_code == 422 and set(refused.json()) == {"code", "message"}
    session = service.create("zero_shot")
    files = [("images", ("../../etc/\x00\x1b[31m" + "x" * 400, batch_of(0, 1)[0]))]
    response = service.http.post(f"/v1/sessions/{session}/batches", files=files).json()
    name = response["predictions"][0]["name"]
    assert name.isprintable() and len(name) <= 255
    for field in (
        {"other": "1"},
        {"images": "text"},
        {"top_k": "0"},
        {"sequence": "x"},
    ):
        files = [("images", ("a.png", batch_of(0, 1)[0]))]
        refused = service.http.post(
            f"/v1/sessions/{session}/batches", files=files, data=field
        )
        assert refused.status_code == 422
