"""Arrangement and ring buffers, by hand; the loss and the votes are in test_literal.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cliquetta.methods.building.ring import newest, write
from cliquetta.methods.domain_norm.domains import arrange


def test_the_arrangement_follows_the_images() -> None:
    confidence = torch.rand(50, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    rows = arrange(confidence)
    assert sorted(rows.tolist()) == list(range(50))
    torch.testing.assert_close(confidence[order][arrange(confidence[order])], confidence[rows])
    # A stretch of it is a sample of the batch, not its confident end.
    assert abs(float(confidence[rows[:25]].mean() - confidence.mean())) < 0.1


class Kept(NamedTuple):
    values: Tensor
    next: Tensor


def test_a_ring_holds_the_last_values() -> None:
    ring, values = Kept(torch.full((5,), -1), torch.tensor(0)), torch.arange(100)
    for start, count in ((0, 2), (2, 1), (3, 4), (7, 5), (12, 3), (15, 1)):
        end = start + count
        ring, slots = write(ring, values=values[start:end])
        assert ring.values[slots].tolist() == list(range(start, end))
        order = newest(ring.next, 5)
        assert ring.values[order].tolist() == list(range(max(0, end - 5), end))[::-1]
