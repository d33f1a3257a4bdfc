"""Ring buffers: named tuples of tensors, with the ``next`` write position."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from cliquetta.model.cuda import send

R = TypeVar("R", bound=Any)


def write(ring: R, **rows: Tensor) -> tuple[R, Tensor]:
    """Write rows (b, ...) of every field over the oldest, at most all.

    Below the size, ``next`` (on the CPU) is the number of slots in use; above it, size
    + next slot.

    Returns:
        The ring, and the slots (b,) that were written.

    """
    (name, first), *_ = rows.items()
    count = len(first)
    size = len(getattr(ring, name))
    written = {}

    # All of it, without a copy.
    if count == size:
        for name, new in rows.items():
            old: Tensor = getattr(ring, name)
            written[name] = new.to(old.dtype)
        written["next"] = torch.tensor(size)
        return ring._replace(**written), torch.arange(size)

    # From the write position on, around the end.
    slots = (ring.next + torch.arange(count)) % size
    after = ring.next + count
    is_in_range = after < 2 * size
    written["next"] = torch.where(is_in_range, after, after - size)

    for name, new in rows.items():
        old = getattr(ring, name)
        positions = send(slots, old.device)
        written[name] = old.index_copy(0, positions, new.to(old.dtype))
    return ring._replace(**written), slots


def newest(position: Tensor, size: int) -> list[int]:
    """List the slots in use of a ring of some size and ``next``, the newest first."""
    last = int(position)
    return [(last - back) % size for back in range(1, min(last, size) + 1)]
