"""A Ray cluster on this machine, for the tests of a module."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray


@contextmanager
def local_ray(cpus: int) -> Iterator[None]:
    """Workers that find the tests' helpers; nothing is sent to anybody."""
    here = str(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # a busy machine would starve them
        patch.setenv("PYTHONPATH", here, prepend=os.pathsep)
        ray.init(
            "local",
            num_cpus=cpus,
            num_gpus=0,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield
        ray.shutdown()
