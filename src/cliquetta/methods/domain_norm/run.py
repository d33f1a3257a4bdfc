"""Calling the pure functions of a step: replayed on CUDA, and not twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.state import Network
from cliquetta.model.cuda import Replayed
from cliquetta.tensor_tree import flatten

R = TypeVar("R")


class Setup(NamedTuple):
    """The network, config and runner of a step."""

    network: Network
    config: DomainNormConfig
    run: Runner


class Runner:
    """Calls pure functions for one step: replayed on CUDA, and not if computed ahead."""

    def __init__(self, replayed: Replayed | None = None) -> None:
        self._replayed = replayed or Replayed(shapes=0)
        self._known: dict[tuple[object, ...], tuple[Any, Any]] = {}
        self._read: dict[int, tuple[Tensor, list[float]]] = {}

    def __call__(self, function: Callable[..., R], *arguments: Any) -> R:
        """The result of ``function``; its arguments are trees of tensors, and constants."""
        key = _identity(function, arguments)
        if key in self._known:
            known: R = self._known[key][1]
            return known
        return self._replayed(function, *arguments)

    def read(self, value: Tensor) -> list[float]:
        """The numbers of a tensor (n,) on the host."""
        if id(value) in self._read:
            return self._read[id(value)][1]
        numbers: list[float] = value.tolist()
        return numbers

    def know(self, result: R, function: Callable[..., R], *arguments: Any) -> R:
        """Keep a result for when it is asked for."""
        self._known[_identity(function, arguments)] = arguments, result
        return result

    def know_read(self, value: Tensor, numbers: list[float]) -> None:
        """Keep the numbers of a tensor on the host."""
        self._read[id(value)] = value, numbers


def _identity(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[object, ...]:
    """A key that distinguishes calls; its tensors live as long as the result under it."""
    return (function.__name__, *((path, id(value)) for path, value in flatten(arguments).items()))
