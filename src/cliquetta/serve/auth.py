"""Who is asking: bearer tokens, and where a server without them may listen."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable

from cliquetta.errors import UserError
from cliquetta.serve.errors import ServiceError

LOCAL = "local"
"""The owner of all sessions of a server without tokens."""
_SHORTEST = 16


class Tokens:
    """The tokens that are let in. Only their hashes are kept, and sessions belong to one each."""

    def __init__(self, tokens: Iterable[str]) -> None:
        given = [token.strip() for token in tokens if token.strip()]
        if not given:
            raise UserError("no tokens given: write one a line, made with `openssl rand -hex 24`")
        if any(len(token) < _SHORTEST or not token.isascii() for token in given):
            raise UserError(
                f"a token has at least {_SHORTEST} ASCII characters: `openssl rand -hex 24`"
            )
        self._digests = sorted({_digest(token) for token in given})

    def owner(self, authorization: str | None) -> str:
        """The owner that an ``Authorization`` header stands for, or a refusal with 401."""
        scheme, _, token = (authorization or "").partition(" ")
        digest = _digest(token.strip())
        # All are compared, each in constant time: the answer's delay tells nothing about a token.
        found = [known for known in self._digests if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not found:
            error = ServiceError(401, "unauthorized", "send Authorization: Bearer TOKEN")
            error.headers = {"WWW-Authenticate": "Bearer"}
            raise error
        return found[0][:16]


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether an address to bind to can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_binding(host: str, tokens: Tokens | None) -> None:
    """Refuse to be reachable from other machines without tokens."""
    if tokens is None and not is_loopback(host):
        raise UserError(
            f"{host} can be reached from other machines: give tokens with --token-file or "
            "CLIQUETTA_TOKEN, or bind to 127.0.0.1"
        )
