"""The cache of all classes at once against the oracle's lists, one clique after the other."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cliquetta.methods.scap.config import SCAPConfig
from cliquetta.methods.scap.retention import (
    Cache,
    closest_pairs,
    propagate,
    resolvent,
    retain,
    retention_graph,
)
from tests._helpers.oracle import scap_config
from tests._helpers.tiny_world import draw
from tests._helpers.tolerance import DOUBLE, STEP, assert_near
from tests.reference import scap_equations as oracle
from tests.reference.scap_equations import ReferenceSettings


def empty_cache(classes: int, capacity: int) -> Cache:
    """A cache with one slot more than it keeps, for the newcomer."""
    slots = capacity + 1
    return Cache(
        torch.zeros(classes, slots, 5).double(),
        torch.zeros(classes, slots, 6).double(),
        torch.zeros(classes, dtype=torch.long),
    )


OPTIONS = {
    "capacity": st.integers(1, 4),
    "neighbours": st.integers(1, 5),
    "bandwidth": st.sampled_from([0.3, 1.0, 3.0]),
    "propagation": st.sampled_from([0.0, 0.3, 0.9]),
    "raw_keys": st.booleans(),
}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batches=st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=3),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_the_cache_agrees_with_the_oracle(
    seed: int, batches: list[list[int]], options: dict[str, Any]
) -> None:
    config = scap_config(**options)
    literal = ReferenceSettings(**options)
    cache = empty_cache(3, config.capacity)
    expected: dict[int, list[tuple[Tensor, Tensor]]] = {i: [] for i in range(3)}

    for number, labels in enumerate(batches):
        keys = 0.7 * draw(len(labels), 5, seed=seed + 2 * number)
        values = draw(len(labels), 6, seed=seed + 2 * number + 1)
        # the engine takes the batch at once
        classes = torch.tensor(labels, dtype=torch.long)
        cache = retain(cache, classes, keys, values, config)
        # the oracle takes one clique after the other
        for label, key, value in zip(labels, keys, values, strict=True):
            entries = expected[label]
            expected[label] = oracle.retain(entries, key, value, literal)

    for label, entries in expected.items():
        assert int(cache.count[label]) == len(entries)
        assert len(entries) <= config.capacity
        for slot, (key, value) in enumerate(entries):
            assert_near(cache.keys[label, slot], key, STEP)
            assert_near(cache.values[label, slot], value, STEP)


def test_the_cache_that_came_in_is_left_alone() -> None:
    before = empty_cache(2, 2)
    retain(
        before,
        torch.tensor([0, 1, 0]),
        draw(3, 5),
        draw(3, 6, seed=1),
        SCAPConfig(capacity=2),
    )

    assert not before.keys.any()
    assert not before.values.any()
    assert not before.count.any()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("n", [2, 7, 11])
def test_the_resolvent_equals_the_inverse(alpha: float, n: int) -> None:
    keys = draw(3, n, 4, seed=n)
    weights = retention_graph(keys, 1.0, 3)
    degree = weights.sum(dim=-1)
    root = degree.rsqrt()
    smooth = root[:, :, None] * weights * root[:, None]

    actual = resolvent(smooth, alpha)
    identity = torch.eye(n).double()
    expected = torch.linalg.inv(identity - alpha * smooth)
    torch.testing.assert_close(actual, expected, rtol=DOUBLE, atol=DOUBLE)


def test_keys_too_far_apart_for_any_weight_stay_where_they_are() -> None:
    keys = 1e3 * torch.eye(3).double()[None]
    torch.testing.assert_close(propagate(keys, SCAPConfig()), 0.7 * keys)


def test_equally_weighted_neighbours_go_to_the_lower_index() -> None:
    # the other three are equally far from key 0, which is the nearest of each
    keys = torch.tensor(
        [
            [0.0, 0.0],
            [1.0, 0.0],
            [0.0, 1.0],
            [-1.0, 0.0],
        ]
    ).double()
    graph = retention_graph(keys[None], 1.0, 1)[0]
    linked_to_the_first = graph[0].nonzero()[:, 0].tolist()

    assert linked_to_the_first == [1, 2, 3]

    settings = ReferenceSettings(bandwidth=1.0, neighbours=1)
    expected = oracle.retention_graph(keys, settings)

    assert_near(graph, expected, DOUBLE)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0]], (0, 1)),
        ([[0.0, 0.0], [9.0, 0.0], [5.0, 0.0], [5.0, 1.0]], (2, 3)),
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], (0, 1)),
    ],
    ids=["four ties", "no tie", "all equal"],
)
def test_the_closest_pair_is_the_lowest_on_ties(
    keys: list[list[float]], expected: tuple[int, int]
) -> None:
    first, second = closest_pairs(torch.tensor([keys]))
    assert (int(first), int(second)) == expected
