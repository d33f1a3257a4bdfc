"""Settings of the operator: models, methods, tokens, limits. Clients can change none of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cliquetta.errors import UserError, look_up
from cliquetta.methods.building.registry import MethodEntry, method_entries
from cliquetta.model.clip import CLIP
from cliquetta.serve.auth import Tokens
from cliquetta.serve.tracing import Tracing

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_MB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """Bounds of what clients may ask for, each set with ``--limit NAME=VALUE``."""

    body_bytes: int = 32 * _MB  # size of one request, counted while it arrives
    body_seconds: float = 60.0  # time for a request to arrive in full
    response_seconds: float = 60.0  # time for a client to read a response in full
    header_seconds: float = 10.0
    """time for a head to arrive, from connection or first byte on"""
    # Time between two requests of one connection. Clients should give connections up
    # earlier (httpx after 5 s, most load balancers after 60 s): a request that meets
    # the server's closing is lost.
    idle_seconds: float = 75.0
    connections: int = 512
    """open connections; the process needs some more file descriptors"""
    images: int = 256  # images per batch
    image_pixels: int = 25_000_000
    """width times height, read from the header before it is decoded"""
    view_bytes: int = (
        1024 * _MB
    )  # size of all views of a batch, counted before the first is made
    state_bytes: int = (
        256 * _MB
    )  # size of one session's memory, and of an imported state
    classes: int = 2000  # class names per session
    class_length: int = 200  # characters per class name or template
    templates: int = 100  # templates per session
    sessions: int = 1000  # sessions on disk, of all clients together
    sessions_per_owner: int = 200
    """sessions on disk per token, or of all clients without tokens"""
    free_bytes: int = (
        64 * _MB
    )  # free disk space below which `/healthz` reports a full disk
    resident_sessions: int = 64
    """sessions in memory; the least recently used are on disk only"""
    resident_bytes: int = (
        1024 * _MB
    )  # size of all sessions in memory; one is always held
    batch_seconds: float = 60.0
    """work on one request; then it is refused and changes nothing"""
    wait_seconds: float = 60.0
    """time in the queue; a request that has waited longer is refused"""
    queued: int = 128  # requests waiting or running, of all sessions
    queued_per_owner: int = 64  # the same of one token; without tokens `queued` counts
    queued_per_session: int = 8  # requests waiting, per session
    queued_bytes: int = (
        256 * _MB
    )  # size of all requests and responses in memory at one time
    replay: int = 4  # responses stored with a session, for clients that repeat a batch
    rate: float = 50.0  # requests per second per token, or per address without tokens
    burst: int = 100  # requests that may come at once before `rate` counts
    upload_bytes: int = (
        1024 * _MB
    )  # size of all uploads of a visitor of the web app within an hour
    wrong_token_rate: float = 0.5
    """Wrong tokens per second per address, ten at once; beyond it right ones are refused, too."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise UserError(f"limit {name} must be above 0, got {value}")

    @classmethod
    def from_text(cls, given: Mapping[str, str]) -> Limits:
        """Defaults with values as typed on a command line: ``{"images": "64"}``."""
        kinds = {name: type(value) for name, value in dataclasses.asdict(cls()).items()}
        values = {}
        for name, text in given.items():
            kind = look_up("limit", name, kinds)
            try:
                values[name] = kind(text)
            except ValueError:
                raise UserError(f"limit {name} is a number, {text!r} is not") from None
        return cls(**values)


def served_methods(allowed: Iterable[str] | None = None) -> dict[str, MethodEntry]:
    """Methods that sessions may use: all that need no fit, or those of them named."""
    known = {entry.name: entry for entry in method_entries() if entry.fit is None}
    names = known if allowed is None else allowed
    return {name: look_up("method that can be served", name, known) for name in names}


@dataclass(frozen=True)
class Settings:
    """Offer of a server: to whom, and how much of it."""

    # by the names that clients use; the first is the default; all sessions share them
    models: Mapping[str, CLIP] = field(default_factory=dict)
    methods: Mapping[str, MethodEntry] = field(default_factory=served_methods)
    tokens: Tokens | None = None  # accepted tokens; `None` accepts everyone
    hosts: frozenset[str] | None = LOCAL_HOSTS
    """accepted `Host` headers; `None`: any, with tokens"""
    limits: Limits = field(default_factory=Limits)
    workers: int = field(
        default_factory=lambda: os.cpu_count() or 1
    )  # sessions at once
    threads: int = 1  # threads of one computation
    session_days: float | None = None
    """delete sessions unused for so many days; `None` keeps them"""
    tracing: Tracing = field(
        default_factory=Tracing
    )  # where spans go; nowhere by default

    def __post_init__(self) -> None:
        if self.tokens is None and self.hosts is None:
            raise UserError(
                "a server without tokens accepts local names only: set hosts"
            )


def name_models(given: Sequence[str]) -> dict[str, str]:
    """Public name and source of each model: ``micro``, or ``NAME=SOURCE`` to hide a path."""
    sources: dict[str, str] = {}
    for value in given:
        name, equals, source = value.partition("=")
        if not name or (equals and not source):
            raise UserError(f"a model is NAME or NAME=PATH, got {value!r}")
        if name in sources:
            raise UserError(f"two models are named {name!r}")
        sources[name] = source or name
    return sources


def load_models(
    sources: Mapping[str, str], load: Callable[[str], CLIP]
) -> dict[str, CLIP]:
    """``load`` every model once, whatever the number of names it has, to be shared by threads."""
    models = {}
    for source in dict.fromkeys(sources.values()):
        model = load(source)
        model.requires_grad_(False).eval()
        _ = model.fingerprint  # cached now, before several threads compute it at once
        if model.text is not None:
            _ = model.tokenizer
        models[source] = model
    return {name: models[source] for name, source in sources.items()}
