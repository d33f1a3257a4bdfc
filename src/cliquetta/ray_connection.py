"""The connection to a Ray cluster (extra ``ray``): of this machine, or of others."""

import logging
import os
import sys
import tempfile
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
def quiet_stderr() -> Iterator[None]:
    """Hold back what native code writes to standard error; it is shown if the block fails.

    Ray's core writes to the file descriptor, past Python's loggers.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        before = os.dup(2)
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            os.dup2(before, 2)
            os.close(before)
            if failed:
                held.seek(0)
                os.write(2, held.read())


@contextmanager
def connected(
    address: str, cores: int | None = None, *, extra: str = "ray"
) -> Iterator[Any]:
    """Ray, connected; a cluster of this machine has ``cores`` (all, if not given).

    Workers have the priority of this process, and their threads wait as those of this
    process do.
    """
    try:
        os.environ.setdefault(
            "RAY_USAGE_STATS_ENABLED", "0"
        )  # nothing is sent to anybody
        # hides Ray's own lines about what goes well, or was deprecated in versions that
        # we allow
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        import ray

        warnings.filterwarnings(
            "ignore", message=r".*is deprecated and will be removed in Ray"
        )
    except ImportError:
        raise UserError(
            f"--ray needs an extra: pip install 'cliquetta[{extra}]'"
        ) from None
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"include_dashboard": False, "num_cpus": cores}
    if (
        address == LOCAL
    ):  # workers inherit the environment; Ray's 15 starves them on a busy machine
        os.environ.setdefault("RAY_worker_niceness", "0")
    else:
        known = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        options = {"runtime_env": {"env_vars": known}} if known else {}
    with quiet_stderr():
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    try:
        yield ray
    finally:
        ray.shutdown()
