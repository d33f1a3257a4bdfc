"""Ring buffers: named tuples of tensors of as many rows each, and ``next``, where one writes on."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from cliquetta.model.cuda import send

R = TypeVar("R", bound=Any)


def write(ring: R, **rows: Tensor) -> tuple[R, Tensor]:
    """Write rows (b, ...) of every field over the oldest, at most all; the ring and their slots.

    Below the size, ``next`` (on the CPU) is the number of slots in use; above it, size
    + next slot.
    """
    (name, first), *_ = rows.items()
    count, size = len(first), len(getattr(ring, name))
    if count == size:  # all of it, without a copy
        replaced = {
            name: new.to(getattr(ring, name).dtype) for name, new in rows.items()
        }
        return ring._replace(**replaced, next=torch.tensor(size)), torch.arange(size)
    slots, after = (ring.next + torch.arange(count)) % size, ring.next + count
    written = {"next": torch.where(after < 2 * size, after, after - size)}
    for name, new in rows.items():
        old: Tensor = getattr(ring, name)
        written[name] = old.index_copy(0, send(slots, old.device), new.to(old.dtype))
    return ring._replace(**written), slots


def newest(position: Tensor, size: int) -> list[int]:
    """The slots in use of a ring of some size and ``next``, the newest first."""
    last = int(position)
    return [(last - back) % size for back in range(1, min(last, size) + 1)]
