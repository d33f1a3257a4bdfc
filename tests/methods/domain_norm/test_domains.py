"""Domain keys by hand; which images of a batch belong to which domain."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cliquetta.methods.domain_norm.domains import (
    DomainKeys,
    absorb,
    batch_figures,
    domain_distance,
    signature,
    split_domains,
)


def test_distance_is_cohens_d_squared_by_hand() -> None:
    known, batch = torch.tensor([[0.0], [2.0]]), torch.tensor([[5.0], [7.0], [6.0]])
    empty = DomainKeys(torch.zeros(1), torch.zeros(1, 1), torch.zeros(1, 1))
    keys = absorb(known, empty)
    assert (float(keys.images), float(keys.mean), float(keys.scatter)) == (2.0, 1.0, 2.0)
    variance = (2.0 + 2.0) / (2 + 3 - 2)
    expected = (6.0 - 1.0) ** 2 / variance - (1 / 3 + 1 / 2)
    assert float(domain_distance(batch, keys)) == pytest.approx(expected)
    assert math.isinf(float(domain_distance(batch, empty)))


def test_keys_absorb_batch_by_batch_what_they_would_absorb_at_once() -> None:
    rows = torch.randn(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros(1, 5, dtype=torch.float64)
    keys = DomainKeys(torch.zeros(1, dtype=torch.float64), zero, zero)
    for part in rows.split(7):
        keys = absorb(part, keys)
    torch.testing.assert_close(keys.mean[0], rows.mean(0))
    torch.testing.assert_close(keys.scatter[0] / 29, rows.var(0))


def test_distance_within_a_domain_is_near_zero_whatever_the_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    empty = DomainKeys(torch.zeros(1), torch.zeros(1, 400), torch.zeros(1, 400))
    for known, size in ((64, 64), (640, 8), (2000, 64)):
        keys = absorb(torch.randn(known, 400, generator=generator), empty)
        same, other = torch.randn(size, 400, generator=generator), 1.0
        assert abs(float(domain_distance(same, keys))) < 0.1
        assert float(domain_distance(same + other, keys)) > 0.8


def test_signature_leaves_the_class_token_out() -> None:
    early = torch.tensor([[[9.0], [1.0], [3.0]]])
    torch.testing.assert_close(signature(early), torch.tensor([[2.0, 2.0**0.5]]))


def two_domains(apart: float) -> DomainKeys:
    """Keys of two domains of 400 channels whose means differ by ``apart`` deviations."""
    generator = torch.Generator().manual_seed(0)
    empty = DomainKeys(torch.zeros(1), torch.zeros(1, 400), torch.zeros(1, 400))
    parts = [
        absorb(torch.randn(200, 400, generator=generator) + shift, empty) for shift in (0.0, apart)
    ]
    return DomainKeys(
        torch.cat([key.images for key in parts]),
        torch.cat([key.mean for key in parts]),
        torch.cat([key.scatter for key in parts]),
    )


def split(batch: Tensor, keys: DomainKeys) -> list[tuple[int | None, Tensor]]:
    """The parts of a batch by figures computed from it."""
    return split_domains(batch, keys, 0.6, batch_figures(batch, keys).tolist())


def test_images_of_a_mixed_batch_go_to_their_own_domains() -> None:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(32, 400, generator=generator)
    batch[::4] += 2.0
    found = split(batch, two_domains(2.0))
    assert [domain for domain, _ in found] == [0, 1]
    assert found[1][1].tolist() == list(range(0, 32, 4))


def test_a_batch_of_one_domain_is_never_split() -> None:
    generator = torch.Generator().manual_seed(2)
    for apart in (0.3, 2.0):  # domains that are nearly one, and domains far apart
        keys = two_domains(apart)
        for shift, expected in ((0.0, 0), (apart, 1)):
            batch = torch.randn(32, 400, generator=generator) + shift
            found = split(batch, keys)
            assert len(found) == 1
            assert apart < 1 or found[0][0] == expected


def test_a_batch_far_from_all_domains_is_new() -> None:
    batch = torch.randn(16, 400, generator=torch.Generator().manual_seed(3)) - 3.0
    ((domain, rows),) = split(batch, two_domains(2.0))
    assert domain is None
    assert rows.tolist() == list(range(16))
