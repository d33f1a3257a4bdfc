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

# Rows of `Replayed.by_rows` at once where their number is rounded up ...
CHUNK = {"cuda": 384}
# ... to a multiple of this: each multiple is recorded once.
STEP = 16


@dataclass(frozen=True)
class Recording:
    """Captured graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    # A tree.
    outputs: Any

    def fits(self, *inputs: Tensor) -> bool:
        """Whether these inputs have the recorded shapes."""
        recorded = [value.shape for value in self.inputs.values()]
        return [value.shape for value in inputs] == recorded

    def replay(self, inputs: Sequence[Any]) -> Any:
        """Compute outputs (copies) for new inputs of the recorded shapes."""
        values = flatten(tuple(inputs))
        sources = [values[path] for path in self.inputs]
        torch._foreach_copy_(list(self.inputs.values()), sources)

        self.graph.replay()
        return map_tensors(torch.clone, self.outputs)


def record(
    function: Callable[..., Any], inputs: Sequence[Any], pool: Any = None
) -> Recording:
    """Run ``function`` on a side stream to warm up, then capture it in a memory pool."""
    tree = tuple(inputs)
    static = {path: value.clone() for path, value in flatten(tree).items()}
    arguments = unflatten(tree, static)
    device = next(iter(static.values())).device

    # Warm-up, beside the work that is queued.
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
        # By function, then by the paths and shapes of its inputs.
        self._recorded: dict[object, dict[tuple[object, ...], Recording]] = {}
        self._pool: Any = None

    def __call__(self, function: Callable[..., R], *inputs: Any) -> R:
        """Call ``function``, which is the same object every time, not a new lambda."""
        return self._call(function, inputs, self.shapes)

    def by_rows(self, function: Function, *rows: Tensor) -> tuple[Tensor, ...]:
        """Call a function that treats every row of its inputs alone."""
        most = CHUNK.get(rows[0].device.type)
        if most is None or not self.shapes:
            return function(*rows)

        # Chunk by chunk, each filled up to a shape that is recorded.
        split = [torch.split(value, most) for value in rows]
        parts = []
        for chunk in zip(*split, strict=True):
            count = len(chunk[0])
            outputs = self._call(function, _fill_up(chunk), most // STEP)
            parts.append([output[:count] for output in outputs])

        if len(parts) == 1:
            return tuple(parts[0])
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _call(
        self, function: Callable[..., R], inputs: Sequence[Any], shapes: int
    ) -> R:
        """Call a function, by a recording unless there are ``shapes`` others."""
        tensors = flatten(tuple(inputs))
        first = next(iter(tensors.values()))
        if not first.is_cuda:
            return function(*inputs)

        # Recordings of this function, by shapes.
        recorded = self._recorded.setdefault(function, {})

        key = tuple((path, v.shape, v.dtype, v.device) for path, v in tensors.items())
        if key not in recorded:
            if len(recorded) >= shapes:
                return function(*inputs)

            # All recordings share one pool: they never run at the same time.
            with torch.cuda.device(first.device):
                if self._pool is None:
                    self._pool = torch.cuda.graph_pool_handle()
                recorded[key] = record(function, inputs, self._pool)
        return recorded[key].replay(inputs)  # type: ignore[no-any-return]


def _fill_up(values: Sequence[Tensor]) -> list[Tensor]:
    """Fill tensors up to a multiple of STEP rows, so that few recordings serve any number."""
    missing = -len(values[0]) % STEP
    if not missing:
        return list(values)
    return [torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) for x in values]


def send(value: Tensor, device: torch.device) -> Tensor:
    """Copy a value to a device; to CUDA through pinned memory, queued behind what runs there."""
    if device.type != "cuda" or value.is_cuda:
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=16)
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU for what is done beside its work: copies in, results out."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Fetched:
    """Copies of tensors on their way to the host; what is queued after them is not waited for."""

    def __init__(self, *values: Tensor) -> None:
        self._values = tuple(value.to("cpu", non_blocking=True) for value in values)
        self._arrived: torch.cuda.Event | None = None

        # An event says when the copies are there; the CPU's are at once.
        device = values[0].device
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(device))

    def wait(self) -> tuple[Tensor, ...]:
        """Return the copies, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
