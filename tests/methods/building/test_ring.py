"""Ring buffers, by hand."""

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.ring import newest, write


class Ring(NamedTuple):
    values: Tensor
    next: Tensor


def test_a_ring_holds_the_last_values() -> None:
    ring = Ring(torch.full((5,), -1), torch.tensor(0))
    values = torch.arange(100)
    seen = 0
    for count in (2, 1, 4, 5, 3, 1):
        written = list(range(seen, seen + count))
        ring, slots = write(ring, values=values[written])
        assert ring.values[slots].tolist() == written

        seen += count
        last_five = list(range(max(0, seen - 5), seen))
        order = newest(ring.next, 5)
        newest_first = ring.values[order].tolist()
        assert newest_first == last_five[::-1]
