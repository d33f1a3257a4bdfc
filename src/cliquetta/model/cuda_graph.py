"""Functions of tensors that are recorded on CUDA and replayed: one launch instead of hundreds.

A batch of 64 images keeps a fast GPU busy for a fraction of the time that Python needs to launch
the kernels one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Recording:
    """A captured graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Outputs (copies) for new inputs of the recorded shapes."""
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


def record(function: Function, inputs: Sequence[Tensor]) -> Recording:
    """Run ``function`` on a side stream to warm up, then capture it."""
    static = [value.clone() for value in inputs]
    side = torch.cuda.Stream(static[0].device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(static[0].device))
    with torch.cuda.stream(side):
        for _ in range(3):
            function(*static)
    torch.cuda.current_stream(static[0].device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function(*static)
    return Recording(graph, static, outputs)


class Replayed:
    """``function``, recorded for the first few shapes of its inputs on CUDA, called elsewhere.

    It must depend on its tensor arguments and on constants only, and may not wait for the device.
    """

    def __init__(self, function: Function, shapes: int = 3) -> None:
        self.function, self.shapes = function, shapes
        self._recorded: dict[tuple[object, ...], Recording] = {}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the function."""
        if not inputs[0].is_cuda:
            return self.function(*inputs)
        key = tuple((value.shape, value.dtype, value.device) for value in inputs)
        if key not in self._recorded:
            if len(self._recorded) >= self.shapes:
                return self.function(*inputs)
            with torch.cuda.device(inputs[0].device):
                self._recorded[key] = record(self.function, inputs)
        return self._recorded[key].replay(inputs)
