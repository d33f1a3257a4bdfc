"""Domain keys by hand; which images of a batch belong to which domain."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import (
    choose_domains,
    distances,
    domain_figures,
    key_of,
    merge_keys,
)
from cliquetta.methods.domain_norm.run import Runner, Setup
from cliquetta.methods.domain_norm.state import Domain, Group, Key, State


def no_images(channels: int) -> Key:
    return Key(torch.tensor(0.0), torch.zeros(channels), torch.zeros(channels))


def test_distance_is_cohens_d_squared_by_hand() -> None:
    known, batch = torch.tensor([[0.0], [2.0]]), torch.tensor([[5.0], [7.0], [6.0]])
    empty = no_images(1)
    key = merge_keys(empty, key_of(known))
    assert (float(key.images), float(key.mean), float(key.scatter)) == (2.0, 1.0, 2.0)
    variance = (2.0 + 2.0) / (2 + 3 - 2)
    expected = (6.0 - 1.0) ** 2 / variance - (1 / 3 + 1 / 2)
    actual = distances(key_of(batch), (key, empty)).tolist()
    assert actual == [pytest.approx(expected), math.inf]


def two_domains(apart: float) -> State:
    """Two domains of 400 channels whose means differ by ``apart`` deviations; the rest is void."""
    generator = torch.Generator().manual_seed(0)
    void: Any = torch.empty(0)
    domains = tuple(
        Domain(void, key_of(rows), void, void, *[torch.tensor(200)] * 6)
        for rows in (torch.randn(200, 400, generator=generator) + shift for shift in (0.0, apart))
    )
    return State(torch.tensor(0), domains, void, Group(torch.zeros(16, 400), torch.tensor(0)))


def split(batch: Tensor, state: State) -> list[tuple[int | None, Tensor]]:
    """The parts of a batch."""
    network: Any = None
    setup = Setup(network, DomainNormConfig(domain_threshold=0.6), Runner())
    return choose_domains(state, batch, setup)


def test_a_batch_of_one_domain_is_never_split() -> None:
    generator = torch.Generator().manual_seed(2)
    for apart in (0.3, 2.0):  # domains that are nearly one, and domains far apart
        state = two_domains(apart)
        for shift, expected in ((0.0, 0), (apart, 1)):
            batch = torch.randn(32, 400, generator=generator) + shift
            actual = split(batch, state)
            assert len(actual) == 1
            assert apart < 1 or actual[0][0] == expected


def test_an_image_alone_is_nearest_by_the_variance_of_a_domain_by_hand() -> None:
    """Up to 4.5, the domain of mean 0 and variance 9 is nearer than that of 6 and 1."""
    wide = Key(torch.tensor(101.0), torch.tensor([0.0]), torch.tensor([900.0]))
    narrow = Key(torch.tensor(3.0), torch.tensor([6.0]), torch.tensor([2.0]))
    one = Key(torch.tensor(1.0), torch.tensor([4.0]), torch.tensor([0.0]))  # has no variance
    figures = domain_figures(torch.tensor([[4.0], [4.6]]), (wide, narrow, one))
    assert figures[:2].tolist() == [0, 1]


@pytest.mark.parametrize(("size", "smallest"), [(16, 4), (32, 4), (64, 8)])
def test_a_part_has_an_eighth_of_the_batch_and_at_least_four_images(
    size: int, smallest: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    for others, parts in ((smallest, [0, 1]), (smallest - 1, [0])):
        batch = torch.randn(size, 400, generator=generator)
        batch[:others] += 2.0
        assert [number for number, _ in split(batch, two_domains(2.0))] == parts
