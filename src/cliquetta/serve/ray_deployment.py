"""The service on Ray Serve: replicas over one database, behind Serve's own HTTP proxy.

Serve sends requests with the same ``X-Session-Id`` to the same replica, for speed only:
what keeps sessions right when replicas die, stall, come and go is the database.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cliquetta.data.remote import is_url
from cliquetta.errors import UserError
from cliquetta.model.factory import create_model, pick_device
from cliquetta.ray_connection import END_HUNG, LOCAL, connected
from cliquetta.serve.asgi import create_app
from cliquetta.serve.auth import check_binding
from cliquetta.serve.database import Database
from cliquetta.serve.logs import logging_as
from cliquetta.serve.server import open_port
from cliquetta.serve.session_store import SessionStore
from cliquetta.serve.settings import Settings, load_models
from cliquetta.serve.tracing import Tracing

EXTRA = "ray-serve"
APPLICATION = "cliquetta"
STOPPING_SECONDS = 3.0
"""Time for replicas to finish what they have begun when the service stops."""
_LEAVING_SECONDS = 7.0  # after which what is left of Ray is killed
_FORCED_SECONDS = 8.0  # the same where the service was still being started
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@dataclass(frozen=True)
class ReplicaPlan:
    """Number of replicas, and the resources of each."""

    least: int = 2  # replicas that are always there
    most: int = 2
    """replicas at most; more than `least` are started while requests queue up"""
    queue: float = 4.0
    """requests per replica, waiting or running, above which one is added"""
    cpus: float = 1.0  # cores of a replica
    gpus: float | None = None
    """share of a GPU; `None`: one if the cluster has any, else none"""
    address: str = LOCAL
    """`local`, `auto` (the cluster of this machine) or an address of Ray"""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UserError(
                f"replicas are N or MIN:MAX from 1, got {self.least}:{self.most}"
            )

    def options(self, settings: Settings, present: float = 0.0) -> dict[str, Any]:
        """Options of Ray Serve for a cluster with ``present`` GPUs."""
        gpus = float(present > 0) if self.gpus is None else self.gpus
        if gpus > present:
            raise UserError(
                f"a replica is to have {gpus} GPUs, the cluster has {present:.0f}"
            )
        return {
            **self._scaling(),
            "name": "Replica",
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": gpus},
            "request_router_config": {
                "request_router_class": _ROUTER,
                "request_router_kwargs": {"num_fallback_replicas": 0},
            },
            # a replica refuses by itself, and says when to come back
            "max_ongoing_requests": 2 * settings.limits.queued,
            "graceful_shutdown_timeout_s": STOPPING_SECONDS,
            "graceful_shutdown_wait_loop_s": 0.5,
            # one that hangs is replaced after three of them
            "health_check_period_s": 5.0,
            "health_check_timeout_s": 10.0,
        }

    def _scaling(self) -> dict[str, Any]:
        if self.least == self.most:
            return {"num_replicas": self.least}
        scaling = {
            "min_replicas": self.least,
            "max_replicas": self.most,
            "target_ongoing_requests": self.queue,
            "upscale_delay_s": 10.0,
        }
        return {"autoscaling_config": scaling}


@dataclass(frozen=True)
class ReplicaBuild:
    """What a replica is made of, wherever it starts."""

    settings: Settings
    """The offer without models."""
    sources: Mapping[str, str]
    """Where the models come from, by the names that clients use."""
    sessions: str
    device: str = "auto"
    dtype: str = "fp32"
    traces: bool = False
    log_format: str = "text"

    def create_app(self) -> Any:
        """The service of one replica, with its models on the device that Ray gave it."""
        warnings.filterwarnings("ignore", module=r"PIL\.")
        logging_as(self.log_format).__enter__()  # for as long as the process lives
        torch.set_num_threads(self.settings.threads)
        device = str(pick_device(self.device))
        load = partial(create_model, device=device, dtype=self.dtype)
        settings = replace(
            self.settings,
            models=load_models(self.sources, load),
            tracing=Tracing.open(self.traces),
        )
        return create_app(SessionStore(Database(self.sessions)), settings)


def serve_replicas(
    build: ReplicaBuild,
    plan: ReplicaPlan,
    *,
    host: str,
    port: int,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve with replicas until the process is stopped; SIGHUP replaces them one by one.

    Args:
        build: What each replica is made of.
        plan: How many there are, and what each may use.
        host: Address that Ray Serve's proxy listens on.
        port: Its port.
        on_ready: Called once requests are answered.

    Raises:
        UserError: The database, the address or the cluster cannot be used.

    """
    check_binding(host, build.settings.tokens)
    build = replace(build, sessions=_shared_sessions(build.sessions, plan.address))
    Database(build.sessions, create=True).close()
    open_port(
        host, port
    ).close()  # else only the log of Serve's proxy would say that it is in use
    os.environ.setdefault(END_HUNG, "1")  # one that hangs is ended at once
    # one more, as a process that hangs may keep its share when it is replaced
    cores = max(os.cpu_count() or 1, math.ceil((plan.most + 1) * plan.cpus))
    with (
        logging_as(build.log_format),
        connected(plan.address, cores, extra=EXTRA) as ray,
    ):
        try:
            from ray import serve
        except ImportError as error:
            raise UserError(
                f"no {error.name}: pip install 'cliquetta[{EXTRA}]'"
            ) from error
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        present = ray.cluster_resources().get("GPU", 0)
        deployment = serve.deployment(**plan.options(build.settings, present))

        def create_replica() -> Any:  # Serve takes plain functions only
            return build.create_app()

        application = deployment(serve.ingress(create_replica)()).bind()

        def deploy() -> None:
            serve.run(application, name=APPLICATION, route_prefix="/")

        is_local = plan.address == LOCAL
        stopped = _on_signals(deploy, is_local=is_local)
        try:
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": host, "port": port},
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
            deploy()
            on_ready()
            stopped.wait()
        finally:
            _stop(serve, ray, is_local=is_local)


def _shared_sessions(sessions: str, address: str) -> str:
    """Where all replicas find the sessions: a folder suits those of one machine only."""
    if is_url(sessions):
        return sessions
    if address != LOCAL:
        raise UserError(
            "replicas on several machines need PostgreSQL: --sessions postgresql+psycopg://..."
        )
    return str(Path(sessions).resolve())


def _on_signals(deploy: Callable[[], None], *, is_local: bool) -> threading.Event:
    """Set the event at SIGTERM and Ctrl-C, and call ``deploy`` in a thread at SIGHUP."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        return stopped

    def stop(*_: object) -> None:
        if not stopped.is_set():
            stopped.set()
            children = _own_processes() if is_local else []
            _in_thread(partial(_end, children, after=_FORCED_SECONDS))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if hasattr(signal, "SIGHUP"):  # requests are served meanwhile
        signal.signal(signal.SIGHUP, lambda *_: _in_thread(deploy))
    return stopped


def _stop(serve: Any, ray: Any, *, is_local: bool) -> None:
    """Stop the service and, with a cluster of its own, all processes of it.

    A signal to the process group has reached those, too: then Ray does not respond any
    more, and what is left of it is killed. Until it is saved no batch counts, so that
    nothing is lost.
    """
    children = _own_processes() if is_local else []

    def leave() -> None:
        if is_local:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
        ray.shutdown()

    leaving = _in_thread(leave)
    end = time.monotonic() + _LEAVING_SECONDS
    while leaving.is_alive() and time.monotonic() < end:
        leaving.join(0.2)
        if any(map(_has_ended, children)):
            # the signal has reached Ray's processes, and its calls would wait for them
            break
    if leaving.is_alive():
        _end(children)


def _own_processes() -> list[Any]:
    """The processes of a cluster of this process."""
    import psutil  # comes with Ray

    return list(psutil.Process().children(recursive=True))


def _has_ended(process: Any) -> bool:
    import psutil

    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _end(children: Sequence[Any], *, after: float = 0.0) -> None:
    """Kill processes that do not end, and end this one."""
    time.sleep(after)
    for child in children:
        with suppress(Exception):  # it has ended by itself
            child.kill()
    os._exit(0)


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
