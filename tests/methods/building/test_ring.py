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
    for start, count in ((0, 2), (2, 1), (3, 4), (7, 5), (12, 3), (15, 1)):
        end = start + count
        ring, slots = write(ring, values=values[start:end])
        assert ring.values[slots].tolist() == list(range(start, end))
        order = newest(ring.next, 5)
        assert ring.values[order].tolist() == list(range(max(0, end - 5), end))[::-1]
