"""Access: bearer tokens, where a server without them may listen, and which pages may send."""

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Iterable
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

from cliquetta.errors import UserError
from cliquetta.serve.errors import ServiceError

LOCAL = "local"  # the owner of all sessions of a server without tokens
_SHORTEST = 16


class Tokens:
    """Accepted tokens, ``#`` lines left out, as hashes; each session belongs to one."""

    def __init__(self, tokens: Iterable[str]) -> None:
        digests = set()
        for line in tokens:
            token = line.strip()
            if not token or token.startswith("#"):
                continue
            if len(token) < _SHORTEST or not token.isascii():
                remedy = "`openssl rand -hex 24`"
                raise UserError(
                    f"a token has at least {_SHORTEST} ASCII characters: {remedy}"
                )
            digests.add(_digest(token))
        if not digests:
            raise UserError(
                "no tokens given: write one per line, made with `openssl rand -hex 24`"
            )
        self._digests = sorted(digests)

    def owner(self, authorization: str | None) -> str:
        """The owner that an ``Authorization`` header stands for, or a refusal with 401."""
        scheme, _, token = (authorization or "").partition(" ")
        digest = _digest(token.strip())
        # All are compared, each in constant time: the delay tells nothing about a
        # token.
        matches = [
            known for known in self._digests if hmac.compare_digest(known, digest)
        ]
        if scheme.lower() != "bearer" or not matches:
            headers = {"WWW-Authenticate": "Bearer"}
            message = "send Authorization: Bearer TOKEN"
            raise ServiceError(401, "unauthorized", message, headers=headers)
        return matches[0][:16]


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def check_binding(host: str, tokens: Tokens | None) -> None:
    """Refuse to be reachable from other machines without tokens."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if tokens is None and not is_local:
        raise UserError(
            f"{host} can be reached from other machines: give tokens with --token-file or "
            "CLIQUETTA_TOKEN, or bind to 127.0.0.1"
        )


def check_origin(headers: Headers, hosts: Collection[str] | None) -> None:
    """Refuse what a web page of another site made a browser send.

    A server without tokens may be addressed by ``hosts`` only: a page may point a name
    of its own at this machine.
    """
    host = headers.get("host", "")
    if hosts is not None and (_parse(f"//{host}").hostname or "") not in hosts:
        raise ServiceError(
            403, "forbidden", "this server is addressed by its local name only"
        )
    origin = headers.get("origin")
    # Browsers say where a request comes from; following a link (navigate) does no harm.
    foreign = headers.get("sec-fetch-site") in {"cross-site", "same-site"}
    foreign = foreign and headers.get("sec-fetch-mode") != "navigate"
    if foreign or (origin is not None and _parse(origin).netloc != host):
        raise ServiceError(
            403, "forbidden", "requests of other sites' pages are refused"
        )


def _parse(url: str) -> SplitResult:
    """The parts of a URL; empty ones where it is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
