"""The known datasets: one :class:`Benchmark` each, in the order of the paper's tables."""

from cliquetta.data.benchmarks.benchmark import Benchmark, DataNotFoundError
from cliquetta.data.benchmarks.cross_domain import CROSS_DOMAIN
from cliquetta.data.benchmarks.imagenet import IMAGENET
from cliquetta.data.benchmarks.small import SMALL

__all__ = ["BENCHMARKS", "Benchmark", "DataNotFoundError"]

BENCHMARKS: tuple[Benchmark, ...] = (*IMAGENET, *CROSS_DOMAIN, *SMALL)
