"""The service on Ray Serve: replicas that share a store, behind one router.

Serve sends the requests of a session to one replica while that lives, for speed only: what keeps
sessions right when replicas die, stall, come and go is the store.
"""

import asyncio
import hashlib
import logging
import math
import os
import signal
import threading
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
from cliquetta.serve.logs import logging_as
from cliquetta.serve.metrics import POST_SECONDS, Board
from cliquetta.serve.router import Forwarded, LostError, Reply, create_router, run_app
from cliquetta.serve.server import make_server, open_port
from cliquetta.serve.settings import Settings, load_models
from cliquetta.serve.store import Store
from cliquetta.serve.tracing import Tracing

EXTRA = "ray-serve"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_log = logging.getLogger(__name__)


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
        limits = settings.limits
        scaling: dict[str, float] = {"min_replicas": self.least, "max_replicas": self.most}
        scaling |= {"target_ongoing_requests": self.queue, "upscale_delay_s": 10.0}
        fixed = self.least == self.most
        gpus = float(present > 0) if self.gpus is None else self.gpus
        if gpus > present:
            raise UserError(f"a replica is to have {gpus} GPUs, the cluster has {present:.0f}")
        return {
            **({"num_replicas": self.least} if fixed else {"autoscaling_config": scaling}),
            "name": "Replica",
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": gpus},
            "request_router_config": {
                "request_router_class": _ROUTER,
                "request_router_kwargs": {"num_fallback_replicas": 0},
            },
            # a replica refuses by itself, and says when to come back
            "max_ongoing_requests": 2 * limits.queued,
            "graceful_shutdown_timeout_s": limits.wait_seconds + limits.batch_seconds,
            "graceful_shutdown_wait_loop_s": 0.5,
            # one that hangs is replaced after three of them, while its requests wait
            "health_check_period_s": 5.0,
            "health_check_timeout_s": 10.0,
        }


class Replica:
    """One process of the service: all of it but admission, which is the router's."""

    async def __init__(  # type: ignore[misc]
        self, build: Callable[[], Settings], where: str, board: Any
    ) -> None:
        from ray import serve

        warnings.filterwarnings("ignore", module=r"PIL\.")
        self._settings = await asyncio.to_thread(build)
        self._app = create_app(Store(where), self._settings, admitted=True)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        name = serve.get_replica_context().replica_id.unique_id
        self._posting = asyncio.create_task(self._post(name, board))

    async def respond(self, request: Forwarded) -> Reply:
        """The service's response to a request."""
        with self._settings.tracing.request(request.trace) as span:
            span["name"] = "replica"
            return await run_app(self._app, request)

    async def __del__(self) -> None:
        self._posting.cancel()
        await self._lifespan.__aexit__(None, None, None)
        self._settings.tracing.close()

    async def _post(self, name: str, board: Any) -> None:
        while True:
            await board.post.remote(name, self._app.state.service.metrics.collect())
            await asyncio.sleep(POST_SECONDS)


def build_settings(
    settings: Settings, sources: Mapping[str, str], device: str, dtype: str, traces: bool
) -> Settings:
    """Settings of a replica, with its models loaded onto the device that it was given."""
    torch.set_num_threads(settings.threads)
    target = str(pick_device(device))
    models = load_models(sources, partial(create_model, device=target, dtype=dtype))
    return replace(settings, models=models, tracing=Tracing.open(traces))


def serve_replicas(
    settings: Settings,
    build: Callable[[], Settings],
    where: Path | str,
    plan: ReplicaPlan,
    *,
    host: str,
    port: int,
    log_format: str = "text",
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve with replicas until the process is stopped; SIGHUP restarts them one by one.

    The router enforces ``settings``; ``build`` makes those of a replica, models included, where it
    runs. ``where`` is a folder that all machines see, or a URL of fsspec.
    """
    check_binding(host, settings.tokens)
    url = str(where) if is_url(str(where)) else str(Path(where).resolve())
    # One that hangs is ended at once, else Serve waits as long as for one that ends its work; and
    # there is room for one more, as its process may keep its share when it is replaced.
    os.environ.setdefault(END_HUNG, "1")
    cores = max(os.cpu_count() or 1, math.ceil((plan.most + 1) * plan.cpus))
    with (
        logging_as(log_format),
        Store.open(url),
        open_port(host, port) as opened,
        connected(plan.address, cores, extra=EXTRA) as ray,
    ):
        try:
            from ray import serve
        except ImportError as error:
            raise UserError(f"no {error.name}: pip install 'cliquetta[{EXTRA}]'") from error
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # we report a lost replica
        board = ray.remote(num_cpus=0)(Board).remote()
        present = ray.cluster_resources().get("GPU", 0)
        replicas = serve.deployment(**plan.options(settings, present))(Replica)
        # of this store: services of others on the cluster stay, one that a dead router left goes on
        name = f"cliquetta-{hashlib.sha256(url.encode()).hexdigest()[:8]}"

        def deploy() -> Any:
            return serve.run(replicas.bind(build, url, board), name=name, route_prefix=None)

        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        try:
            handle = deploy()
            if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():

                def restart(*_: Any) -> None:  # one by one; requests are served meanwhile
                    threading.Thread(target=deploy, daemon=True).start()

                signal.signal(signal.SIGHUP, restart)
            app = create_router(settings, _ask_by(handle), board.read.remote)
            on_ready()
            make_server(app, settings.limits).run(sockets=[opened])
        finally:
            settings.tracing.close()
            serve.delete(name)


def _ask_by(handle: Any) -> Callable[[str, Forwarded], Any]:
    """Ask through a handle of Serve; a session id decides which replica responds."""
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import RayServeException

    async def ask(session: str, request: Forwarded) -> Reply:
        try:
            response: Reply = await handle.options(session_id=session).respond.remote(request)
            return response
        except RayTaskError:
            raise  # a defect of ours, not a loss
        except (RayError, RayServeException) as error:
            _log.warning("a request is sent again: %s", type(error).__name__)
            raise LostError from error

    return ask
