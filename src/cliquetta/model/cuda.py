"""CUDA without idle time: calls replayed as CUDA graphs, small copies that wait for nothing else.

A plain copy stops the host until the device is done, and the device then waits for the
host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from cliquetta.tensor_tree import flatten, map_tensors, unflatten

Function = Callable[..., tuple[Tensor, ...]]
R = TypeVar("R")

CHUNK = {
    "cuda": 384
}  # rows of `Replayed.by_rows` at once where their number is rounded up
STEP = 16  # to a multiple of this: each multiple is recorded once


@dataclass(frozen=True)
class Recording:
    """A captured graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    outputs: Any  # a tree

    def fits(self, *inputs: Tensor) -> bool:
        """Whether these inputs have the recorded shapes."""
        return [value.shape for value in inputs] == [
            v.shape for v in self.inputs.values()
        ]

    def replay(self, inputs: Sequence[Any]) -> Any:
        """Outputs (copies) for new inputs of the recorded shapes."""
        given = flatten(tuple(inputs))
        torch._foreach_copy_(
            list(self.inputs.values()), [given[path] for path in self.inputs]
        )
        self.graph.replay()
        return map_tensors(torch.clone, self.outputs)


def record(
    function: Callable[..., Any], inputs: Sequence[Any], pool: Any = None
) -> Recording:
    """Run ``function`` on a side stream to warm up, then capture it in a memory pool."""
    static = {path: value.clone() for path, value in flatten(tuple(inputs)).items()}
    arguments, device = (
        unflatten(tuple(inputs), static),
        next(iter(static.values())).device,
    )
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            function(*arguments)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = function(*arguments)
    return Recording(graph, static, outputs)


class Replayed:
    """Calls functions; on CUDA, each is recorded for the first few shapes of its inputs.

    A function must depend on its arguments only, trees of tensors
    (:mod:`cliquetta.tensor_tree`) and constants that never change, and may not wait for
    the device. ``shapes=0`` records nothing.
    """

    def __init__(self, shapes: int = 3) -> None:
        self.shapes = shapes
        self._recorded: dict[
            Callable[..., Any], dict[tuple[object, ...], Recording]
        ] = {}
        self._pool: Any = None

    def __call__(self, function: Callable[..., R], *inputs: Any) -> R:
        """The outputs of ``function``: the same object at every call, not a new lambda."""
        return self._call(function, inputs, self.shapes)

    def by_rows(self, function: Function, *rows: Tensor) -> tuple[Tensor, ...]:
        """The outputs of a function that treats every row of its inputs alone."""
        most = CHUNK.get(rows[0].device.type)
        if most is None or not self.shapes:
            return function(*rows)
        # filled up with copies of a row, so that few recordings serve any number
        parts = []
        for own in zip(*(torch.split(value, most) for value in rows), strict=True):
            n = len(own[0])
            fill = -n % STEP
            full = [
                torch.cat([x, x[:1].expand(fill, *x.shape[1:])]) if fill else x
                for x in own
            ]
            parts.append(
                [output[:n] for output in self._call(function, full, most // STEP)]
            )
        if len(parts) == 1:
            return tuple(parts[0])
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _call(
        self, function: Callable[..., R], inputs: Sequence[Any], shapes: int
    ) -> R:
        """The outputs, of a recording unless there are ``shapes`` others."""
        tensors = flatten(tuple(inputs))
        first = next(iter(tensors.values()))
        if not first.is_cuda:
            return function(*inputs)
        recorded = self._recorded.setdefault(function, {})
        key = tuple((path, v.shape, v.dtype, v.device) for path, v in tensors.items())
        if key not in recorded:
            if len(recorded) >= shapes:
                return function(*inputs)
            with torch.cuda.device(first.device):
                if self._pool is None:
                    self._pool = torch.cuda.graph_pool_handle()
                recorded[key] = record(function, inputs, self._pool)
        return recorded[key].replay(inputs)  # type: ignore[no-any-return]


def send(value: Tensor, device: torch.device) -> Tensor:
    """``value`` on ``device``; to CUDA through pinned memory, queued behind what runs there."""
    if device.type != "cuda" or value.is_cuda:
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=16)
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU for what is done beside its work: copies in, results out."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Fetched:
    """Copies of tensors on their way to the host; what is queued after them is not waited for."""

    def __init__(self, *values: Tensor) -> None:
        self._values = tuple(value.to("cpu", non_blocking=True) for value in values)
        self._arrived: torch.cuda.Event | None = None
        if values[0].is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(values[0].device))

    def wait(self) -> tuple[Tensor, ...]:
        """The copies, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
