"""The connection to a Ray cluster (extra ``ray``): of this machine, or of others."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cliquetta.errors import UserError

LOCAL = "local"
"""The address that starts a cluster on this machine, for as long as the grid runs."""
END_HUNG = "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"
_PASSED_ON = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", END_HUNG)
"""Variables passed on to workers: those of Serve, and how threads wait (:mod:`cliquetta.cli`)."""


@contextmanager
def connected(address: str, cores: int | None = None, *, extra: str = "ray") -> Iterator[Any]:
    """Ray, connected; a cluster of this machine has ``cores`` (all, if not given).

    Workers have the priority of this process, and their threads wait as those of this process do.
    """
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
        # Ray's own lines about what goes well, or was deprecated in the versions that we allow
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        import ray

        warnings.filterwarnings("ignore", message=r".*is deprecated and will be removed in Ray")
    except ImportError:
        raise UserError(f"--ray needs an extra: pip install 'cliquetta[{extra}]'") from None
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"include_dashboard": False, "num_cpus": cores}
    if address == LOCAL:  # workers inherit the environment; Ray's 15 starves them on a busy machine
        os.environ.setdefault("RAY_worker_niceness", "0")
    else:
        known = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        options = {"runtime_env": {"env_vars": known}} if known else {}
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    try:
        yield ray
    finally:
        ray.shutdown()
