"""The service on Ray Serve: replicas over one database, behind Serve's own HTTP proxy.

Serve sends requests with the same ``X-Session-Id`` to the same replica, for speed only: what keeps
sessions right when replicas die, stall, come and go is the database.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping
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
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@dataclass(frozen=True)
class ReplicaPlan:
    """Number of replicas, and the resources of each."""

    least: int = 2  # replicas that are always there
    most: int = 2  # replicas at most; more than `least` are started while requests queue up
    queue: float = 4.0  # requests per replica, waiting or running, above which one is added
    cpus: float = 1.0  # cores of a replica
    gpus: float | None = None  # share of a GPU; `None`: one if the cluster has any, else none
    address: str = LOCAL  # `local`, `auto` (the cluster of this machine) or an address of Ray

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UserError(f"replicas are N or MIN:MAX from 1, got {self.least}:{self.most}")

    def options(self, settings: Settings, present: float = 0.0) -> dict[str, Any]:
        """Options of Ray Serve for a cluster with ``present`` GPUs."""
        gpus = float(present > 0) if self.gpus is None else self.gpus
        if gpus > present:
            raise UserError(f"a replica is to have {gpus} GPUs, the cluster has {present:.0f}")
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


STOPPING_SECONDS = 4.0
"""Time for replicas to finish what they have begun when the service stops."""
_DISCONNECT_SECONDS = 3.0


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
    build = replace(build, sessions=_shared(build.sessions, plan.address))
    Database(build.sessions, create=True).close()
    open_port(host, port).close()  # else the proxy's log alone would say that it is in use
    os.environ.setdefault(END_HUNG, "1")
    cores = max(os.cpu_count() or 1, math.ceil((plan.most + 1) * plan.cpus))
    stopped = _stop_signals()
    with (
        logging_as(build.log_format),
        connected(plan.address, cores, extra=EXTRA) as ray,
    ):
        try:
            from ray import serve
        except ImportError as error:
            raise UserError(f"no {error.name}: pip install 'cliquetta[{EXTRA}]'") from error
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        present = ray.cluster_resources().get("GPU", 0)
        replica = serve.deployment(**plan.options(build.settings, present))
        application = replica(serve.ingress(build.create_app)()).bind()

        def deploy(*_: object) -> None:
            serve.run(application, name=APPLICATION, route_prefix="/")

        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        deploy()
        on_ready()
        stopped.wait()
        _stop(serve, plan.address)
