"""What a cluster is asked for and what its reports do, without a cluster."""

from types import SimpleNamespace
from typing import Any

import pytest

from cliquetta.errors import UserError
from cliquetta.inference.ray_driver import BatchReport, RayCluster, RayWorkers


def cluster_of(gpus: float, cores: float) -> Any:
    """Ray as far as it tells what the cluster has."""
    return SimpleNamespace(cluster_resources=lambda: {"GPU": gpus, "CPU": cores})


@pytest.mark.parametrize(
    ("gpus", "actors", "cores_of_an_actor"), [(0.0, 1, 1), (1.0, 1, 0), (4.0, 4, 0)]
)
def test_there_is_an_actor_per_gpu_or_one(
    gpus: float, actors: int, cores_of_an_actor: int
) -> None:
    workers = RayCluster()._share(cluster_of(gpus, cores=8.0))
    assert workers.actors == actors
    assert workers.cores == cores_of_an_actor


def test_actors_that_share_a_gpu_are_counted() -> None:
    workers = RayCluster(gpus_per_actor=0.5)._share(cluster_of(2.0, cores=8.0))
    assert workers.actors == 4
    with pytest.raises(UserError, match=r"5 actors with 0\.5 GPUs each are too many"):
        RayCluster(actors=5, gpus_per_actor=0.5)._share(cluster_of(2.0, cores=8.0))


def test_what_an_actor_refuses_ends_the_run_with_its_reason() -> None:
    workers = RayWorkers(None, RayCluster(), actors=1, gpus=0, cores=1)
    work: Any = None  # a refusal is not counted
    with pytest.raises(UserError, match="logits are not finite"):
        workers._take(work, BatchReport(refusal="logits are not finite"))
