"""Small tensors between host and device without waiting for more than they need.

A plain copy of a few indices stops the host until the device has done all it was given, and the
device then idles while the host prepares the next kernels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def send(value: Tensor, device: torch.device) -> Tensor:
    """``value`` on ``device``; to CUDA through pinned memory, queued behind what runs there."""
    if device.type != "cuda" or value.is_cuda:
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=16)
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU for what is done beside its work: copies in, answers out."""
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
