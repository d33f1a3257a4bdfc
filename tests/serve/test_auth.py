"""Only known tokens are let in, and web pages of others are turned away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cliquetta.model.clip import CLIP
from cliquetta.serve.auth import Tokens, check_binding, is_loopback
from cliquetta.serve.server import serve
from cliquetta.serve.settings import Settings
from tests._helpers.serve_setup import ALICE, BOB, CLASSES, Local, bearer, local_service


def test_only_known_tokens_are_let_in_and_see_their_own_sessions_only(
    tmp_path: Path, tiny_clip: CLIP
) -> None:
    tokens = Tokens([ALICE, BOB])
    with local_service(tmp_path, tiny_clip, tokens=tokens, hosts=None, host="any.org") as service:
        http = service.http
        request = {"classes": CLASSES, "method": "zero_shot"}
        wrong: list[Any] = [{}, bearer(ALICE[:-1]), bearer(ALICE + "x")]
        wrong += [{"Authorization": value} for value in (f"Basic {ALICE}", b"Bearer \xff\xfe")]
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
        for method, where in (
            ("GET", path),
            ("DELETE", path),
            ("GET", f"{path}/state"),
            ("PUT", f"{path}/state"),
            ("POST", f"{path}/reset"),
            ("POST", f"{path}/batches"),
        ):
            assert http.request(method, where, headers=bearer(BOB)).status_code == 404
        assert http.get("/v1/sessions", headers=bearer(BOB)).json()["sessions"] == [theirs.json()]
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("*/*.safetensors"))
    assert stored and ALICE.encode() not in stored


def test_tokens_must_be_long_and_no_open_port_goes_without(tiny_clip: CLIP) -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Tokens(["short"])
    with pytest.raises(ValueError, match="no tokens"):
        Tokens(["", "  "])
    for host in ("127.0.0.1", "localhost", "::1", "127.8.0.1"):
        assert is_loopback(host)
        check_binding(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ValueError, match="other machines"):
            check_binding(host, None)
        check_binding(host, Tokens([ALICE]))
    with pytest.raises(ValueError, match="other machines"):
        serve(Settings(models={"tiny": tiny_clip}), "unused", host="0.0.0.0", port=1)
    assert not Path("unused").exists()


def test_web_pages_of_others_are_turned_away(service: Local) -> None:
    """A page may point its own name at 127.0.0.1, or post to it; both show in the headers."""
    get = service.http.get
    assert get("/v1/sessions", headers={"Host": "evil.org"}).status_code == 403
    assert get("/v1/sessions", headers={"Host": "localhost:8765"}).status_code == 200
    assert get("/v1/sessions", headers={"Origin": "http://evil.org"}).status_code == 403
    assert get("/v1/sessions", headers={"Origin": "null"}).status_code == 403
    assert get("/v1/sessions", headers={"Origin": "http://127.0.0.1"}).status_code == 200
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        assert get("/v1/sessions", headers={"Sec-Fetch-Site": site}).status_code == status
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert get("/docs", headers=link).status_code == 200
