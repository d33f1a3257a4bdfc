"""Only known tokens are let in, and web pages of others are turned away."""

from pathlib import Path
from typing import Any

import pytest

from cliquetta.model.clip import CLIP
from cliquetta.serve.auth import Tokens, check_binding
from cliquetta.serve.server import serve as start
from cliquetta.serve.settings import Settings
from tests._helpers.serve_setup import ALICE, BOB, CLASSES, Local, bearer
from tests.serve.conftest import Serve


def test_known_tokens_see_their_own_sessions_only(serve: Serve, where: str) -> None:
    with serve(tokens=[ALICE, BOB], host="any.org") as service:
        http = service.http
        request = {"classes": CLASSES, "method": "zero_shot"}
        wrong: list[Any] = [{}, bearer(ALICE[:-1]), bearer(ALICE + "x")]
        wrong += [
            {"Authorization": value} for value in (f"Basic {ALICE}", b"Bearer \xff\xfe")
        ]
        for headers in wrong:
            refused = http.post("/v1/sessions", json=request, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"] == "Bearer"
        assert http.get("/metrics").status_code == 401
        assert http.get("/healthz").status_code == 200
        key = {"Idempotency-Key": "one"}
        made, again, theirs = (
            http.post("/v1/sessions", json=request, headers={**bearer(who), **key})
            for who in (ALICE, ALICE, BOB)
        )
        assert again.json() == made.json() and theirs.json()["id"] != made.json()["id"]
        path = f"/v1/sessions/{made.json()['id']}"
        assert http.get(path, headers=bearer(ALICE)).status_code == 200
        for method in (
            "GET",
            "DELETE",
            "GET /state",
            "PUT /state",
            "POST /reset",
            "POST /batches",
        ):
            verb, _, below = method.partition(" ")
            assert (
                http.request(verb, path + below, headers=bearer(BOB)).status_code == 404
            )
        assert http.get("/v1/sessions", headers=bearer(BOB)).json()["sessions"] == [
            theirs.json()
        ]
    if "://" not in where:
        stored = b"".join(path.read_bytes() for path in Path(where).iterdir())
        assert made.json()["id"].encode() in stored and ALICE.encode() not in stored


def test_tokens_must_be_long_and_no_open_port_goes_without(tiny_clip: CLIP) -> None:
    for tokens, words in ((["short"], "16"), (["", "  "], "no tokens")):
        with pytest.raises(ValueError, match=words):
            Tokens(tokens)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.0.1"):
        check_binding(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ValueError, match="other machines"):
            check_binding(host, None)
        check_binding(host, Tokens([ALICE]))
    with pytest.raises(ValueError, match="other machines"):
        start(Settings(models={"tiny": tiny_clip}), "unused", host="0.0.0.0", port=1)
    assert not Path("unused").exists()


def test_web_pages_of_others_are_turned_away(service: Local) -> None:
    """A page may point its own name at 127.0.0.1, or post to it; both show in the headers."""
    for name, value, status in (
        ("Host", "evil.org", 403),
        ("Host", "localhost:8765", 200),
        ("Origin", "http://evil.org", 403),
        ("Origin", "null", 403),
        ("Origin", "http://127.0.0.1", 200),
        ("Sec-Fetch-Site", "cross-site", 403),
        ("Sec-Fetch-Site", "same-site", 403),
        ("Sec-Fetch-Site", "same-origin", 200),
    ):
        response = service.http.get("/v1/sessions", headers={name: value})
        assert response.status_code == status, value
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert service.http.get("/docs", headers=link).status_code == 200
