"""Domain keys by hand; which domain a batch belongs to."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cliquetta.methods.domain_norm.config import DomainNormConfig
from cliquetta.methods.domain_norm.domains import (
    choose_domain,
    judged_signatures,
    key_distances,
    key_of,
    merge_keys,
)
from cliquetta.methods.domain_norm.state import Domain, Key, State


def test_distance_is_cohens_d_squared_by_hand() -> None:
    known = torch.tensor([[0.0], [2.0]])
    batch = torch.tensor([[5.0], [7.0], [6.0]])
    empty = Key(images=torch.tensor(0.0), mean=torch.zeros(1), scatter=torch.zeros(1))
    key = merge_keys(empty, key_of(known))

    assert float(key.images) == 2
    assert float(key.mean) == 1
    assert float(key.scatter) == 2

    # both scatter by 2 around means of 1 and 6; less what chance gives 2 and 3 images
    variance = (2.0 + 2.0) / (2 + 3 - 2)
    by_chance = 1 / 3 + 1 / 2
    expected = (6.0 - 1.0) ** 2 / variance - by_chance
    to_known, to_empty = key_distances(key_of(batch), (key, empty)).tolist()

    assert to_known == pytest.approx(expected)
    assert to_empty == math.inf


def test_keys_of_two_parts_are_merged_to_the_key_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 4, generator=generator).double()
    first = key_of(rows[:7])
    second = key_of(rows[7:])

    torch.testing.assert_close(merge_keys(first, second), key_of(rows))


def two_domains(seen: int = 200) -> State:
    """Two domains of which the first is in use; all that does not tell them apart is void."""
    void: Any = torch.empty(0)
    domain = Domain(
        norms=void,
        temperature=void,
        key=void,
        counts=void,
        images=torch.tensor(seen),
        due=void,
        last_used=void,
    )
    return State(
        current=torch.tensor(0), domains=(domain, domain), window=void, group=void
    )


@pytest.mark.parametrize(
    ("images", "distances", "expected"),
    [
        (64, [0.1, 0.5], 0),
        (64, [0.5, 0.1], 1),
        (64, [0.62, 0.9], 0),  # 0.6 (1 + 3/64) is 0.628
        (64, [0.64, 0.9], None),
        (4, [0.70, 0.9], 0),  # judged by 16 images: 0.6 (1 + 3/16) is 0.7125
        (4, [0.72, 0.9], None),
    ],
)
def test_a_batch_belongs_to_the_nearest_domain_within_reach(
    images: int, distances: list[float], expected: int | None
) -> None:
    config = DomainNormConfig(domain_threshold=0.6)
    assert choose_domain(two_domains(), images, distances, config) == expected


def test_a_domain_of_fewer_than_32_images_takes_every_batch() -> None:
    config = DomainNormConfig()
    far = [5.0, 0.1]
    young = two_domains(seen=31)

    assert choose_domain(young, 64, far, config) == 0

    older = two_domains(seen=32)
    assert choose_domain(older, 64, far, config) == 1


def test_small_batches_are_judged_by_the_last_16_images() -> None:
    group = torch.arange(16.0)[:, None]
    small = torch.tensor([[20.0], [21.0]])
    newest = torch.cat([group[2:], small])

    assert torch.equal(judged_signatures(group, small), newest)


def test_large_batches_are_judged_by_themselves() -> None:
    group = torch.arange(16.0)[:, None]
    large = torch.zeros(16, 1)
    assert judged_signatures(group, large) is large


@pytest.mark.parametrize(
    ("apart", "shift", "expected"),
    [(0.3, 0.0, None), (0.3, 0.3, None), (2.0, 0.0, 0), (2.0, 2.0, 1)],
    ids=["near, first", "near, second", "far, first", "far, second"],
)
def test_a_batch_goes_to_its_own_domain_if_they_are_far_apart(
    apart: float, shift: float, expected: int | None
) -> None:
    generator = torch.Generator().manual_seed(2)

    def rows(count: int, shift: float) -> Tensor:
        return torch.randn(count, 400, generator=generator) + shift

    first = key_of(rows(200, 0.0))
    second = key_of(rows(200, apart))
    batch = key_of(rows(32, shift))
    distances = key_distances(batch, (first, second)).tolist()
    chosen = choose_domain(two_domains(), 32, distances, DomainNormConfig())

    # between near domains either may be chosen, but no new one is opened
    assert chosen in ((0, 1) if expected is None else (expected,))
