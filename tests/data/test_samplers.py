"""Samplers: which images a stream shows, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cliquetta.data.samplers import (
    SAMPLERS,
    Domain,
    Indices,
    Places,
    SamplerOptions,
    correlated,
    parse_present,
)
from cliquetta.errors import UserError


def draw(name: str, *sizes: int, seed: int = 0, **options: Any) -> Places:
    domains = [Domain(str(n), np.arange(size) % 10) for n, size in enumerate(sizes)]
    return SAMPLERS[name].draw(domains, SamplerOptions(**options), np.random.default_rng(seed))


def bursts(labels: Indices, gamma: float, seed: int) -> Indices:
    order = correlated(
        Domain("a", labels), SamplerOptions(gamma=gamma), np.random.default_rng(seed)
    )
    return labels[order]


def runs(labels: Indices) -> int:
    return 1 + int((labels[1:] != labels[:-1]).sum())


@pytest.mark.parametrize("name", sorted(set(SAMPLERS) - {"uneven", "long"}))
@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 60), min_size=2, max_size=3))
@settings(max_examples=20, deadline=None)
def test_every_image_is_shown_once(name: str, seed: int, sizes: list[int]) -> None:
    places = draw(name, *sizes, seed=seed)
    found = sorted(zip(places.domain.tolist(), places.image.tolist(), strict=True))
    assert found == [(n, i) for n, size in enumerate(sizes) for i in range(size)]
    assert not places.round.any()


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_seed_and_the_options_read_decide_the_places(name: str) -> None:
    def same(a: Places, b: Places) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))

    changes = {"gamma": 3.0, "present": (2, 2), "length": 77}
    plain = draw(name, 100, 50)
    assert same(plain, draw(name, 100, 50))
    assert same(plain, draw(name, 100, 50, seed=1)) == (name == "sequential")
    read = {
        key
        for key, value in changes.items()
        if not same(plain, draw(name, 100, 50, **{key: value}))  # type: ignore[arg-type]
    }
    assert read == set(SAMPLERS[name].reads)


def test_small_gamma_gives_long_bursts() -> None:
    labels = np.arange(1000) % 10
    lengths = [np.mean([runs(bursts(labels, g, s)) for s in range(5)]) for g in (0.01, 0.1, 1.0)]
    shuffled = runs(np.random.default_rng(0).permutation(labels))
    assert lengths[0] < lengths[1] < lengths[2] < shuffled / 5
    assert lengths[0] < 20


def test_an_uneven_stream_holds_all_images_of_a_few_classes() -> None:
    kinds = [np.unique(draw("uneven", 200, seed=s).image % 10) for s in range(5)]
    assert {len(kind) for kind in kinds} == {3}
    assert len({tuple(kind) for kind in kinds}) > 1
    assert len(draw("uneven", 200, present=(4, 4)).image) == 80
    counts = {
        len(np.unique(draw("uneven", 200, seed=s, present=(1, 4)).image % 10)) for s in range(20)
    }
    assert counts == {1, 2, 3, 4}


def test_a_dataset_that_comes_back_brings_new_images() -> None:
    a, b = Domain("a", np.arange(9)), Domain("b", np.arange(4))
    places = SAMPLERS["recurring"].draw([a, b, a], SamplerOptions(), np.random.default_rng(0))
    assert places.domain.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    assert sorted(places.image[places.domain != 1]) == list(range(9))


def test_a_long_stream_repeats_its_datasets_as_often_as_needed() -> None:
    places = draw("long", 30, 10, length=100)
    assert np.bincount(places.round).tolist() == [40, 40, 20]
    assert places.domain[:40].tolist() == [0] * 30 + [1] * 10
    assert sorted(places.image[40:70]) == list(range(30))
    assert not np.array_equal(places.image[:30], places.image[40:70])


def test_present_is_a_number_or_a_range() -> None:
    assert parse_present("3") == (3, 3)
    assert parse_present("1-4") == (1, 4)
    with pytest.raises(UserError, match="a range such as 1-4"):
        parse_present("some")
