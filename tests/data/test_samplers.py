"""Samplers: which images a stream shows, and when."""

from collections.abc import Sequence
from dataclasses import asdict
from inspect import signature
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cliquetta.cli.evaluate import evaluate
from cliquetta.data.samplers import (
    SAMPLERS,
    Indices,
    LabelledSet,
    Positions,
    SamplerOptions,
    interleave,
    parse_present,
)
from cliquetta.errors import UserError


def draw(name: str, *sizes: int, seed: int = 0, **options: Any) -> Positions:
    """Draw from datasets of these sizes, whose image i is of class i % 10."""
    return draw_from(name, sizes, seed, SamplerOptions(**options))


def draw_from(
    name: str, sizes: Sequence[int], seed: int, options: SamplerOptions
) -> Positions:
    domains = [
        LabelledSet(str(number), np.arange(size) % 10)
        for number, size in enumerate(sizes)
    ]
    return SAMPLERS[name].draw(domains, options, np.random.default_rng(seed))


def runs(labels: Indices) -> int:
    return 1 + int((labels[1:] != labels[:-1]).sum())


@pytest.mark.parametrize(
    "name", sorted(set(SAMPLERS) - {"uneven", "long", "keff", "long-tail"})
)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 60), min_size=2, max_size=3),
)
@settings(max_examples=20, deadline=None)
def test_every_image_is_shown_once(name: str, seed: int, sizes: list[int]) -> None:
    positions = draw_from(name, sizes, seed, SamplerOptions())
    assert not positions.round.any()
    for domain, size in enumerate(sizes):
        shown = positions.image[positions.domain == domain]
        assert sorted(shown) == list(range(size))
    assert len(positions.image) == sum(sizes)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_seed_and_the_options_read_decide_the_positions(name: str) -> None:
    def same(a: Positions, b: Positions) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))

    usual: dict[str, Any] = {"batch_size": 8}
    changes = {
        "gamma": 3.0,
        "present": (2, 2),
        "length": 77,
        "imbalance": 2.0,
        "batch_size": 4,
    }
    plain = draw(name, 100, 50, **usual)
    assert same(plain, draw(name, 100, 50, **usual))
    assert same(plain, draw(name, 100, 50, seed=1, **usual)) == (name == "sequential")
    read = {
        key
        for key, value in changes.items()
        if not same(plain, draw(name, 100, 50, **{**usual, key: value}))
    }
    assert read == set(SAMPLERS[name].reads)


def test_small_gamma_gives_long_bursts() -> None:
    labels = np.arange(1000) % 10

    def bursts(gamma: float, seed: int) -> int:
        return runs(labels[draw("correlated", 1000, seed=seed, gamma=gamma).image])

    lengths = [
        np.mean([bursts(gamma, seed) for seed in range(5)])
        for gamma in (0.01, 0.1, 1.0)
    ]
    shuffled = runs(np.random.default_rng(0).permutation(labels))
    assert lengths[0] < lengths[1] < lengths[2] < shuffled / 5
    assert lengths[0] < 20


def test_an_uneven_stream_holds_all_images_of_a_few_classes() -> None:
    # 200 images, of which image i is of class i % 10
    four_classes = draw("uneven", 200, present=(4, 4)).image
    assert len(four_classes) == 80

    kinds = []
    for seed in range(5):
        shown = draw("uneven", 200, seed=seed).image
        kinds.append(tuple(np.unique(shown % 10)))
    assert {len(kind) for kind in kinds} == {3}
    assert len(set(kinds)) > 1


def test_the_number_of_classes_of_an_uneven_stream_is_drawn_from_its_range() -> None:
    numbers = set()
    for seed in range(20):
        shown = draw("uneven", 200, seed=seed, present=(1, 4)).image
        numbers.add(len(np.unique(shown % 10)))
    assert numbers == {1, 2, 3, 4}


def test_separate_classes_come_one_after_the_other() -> None:
    orders = set()
    for seed in range(5):
        classes = draw("separate", 200, seed=seed).image % 10
        orders.add(tuple(dict.fromkeys(classes)))
    assert len(orders) == 5

    shown = draw("separate", 200).image
    first_class = shown[:20]
    assert runs(shown % 10) == 10
    assert not np.array_equal(first_class, np.sort(first_class))


@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 40),
    low=st.integers(1, 5),
    more=st.integers(0, 5),
    counts=st.lists(st.integers(1, 60), min_size=10, max_size=10),
)
@settings(max_examples=60, deadline=None)
def test_every_batch_holds_so_many_classes(
    seed: int, size: int, low: int, more: int, counts: list[int]
) -> None:
    labels = np.repeat(np.arange(10), counts)
    high = low + more

    def draw_positions() -> Positions:
        return SAMPLERS["keff"].draw(
            [LabelledSet("a", labels)],
            SamplerOptions(present=(low, high), batch_size=size),
            np.random.default_rng(seed),
        )

    # The largest classes together do not fill a batch.
    if sum(sorted(counts)[-high:]) < size:
        with pytest.raises(UserError, match="smaller"):
            draw_positions()
        return
    images = draw_positions().image
    assert len(images) % size == 0
    assert len(np.unique(images)) == len(images)
    batches = labels[images].reshape(-1, size)
    present = [len(np.unique(batch)) for batch in batches]
    assert min(present) >= min(low, size)
    assert max(present) <= high


def test_numbers_of_classes_in_batches_are_spread_over_the_range() -> None:
    """Uniform from 1 to 4: 300 draws are within four standard deviations of 75 each."""
    drawn = []
    for seed in range(30):
        images = draw("keff", 1000, seed=seed, present=(1, 4), batch_size=20).image
        ten_batches = images.reshape(-1, 20)[:10]
        drawn += [len(np.unique(batch % 10)) for batch in ten_batches]
    counts = np.bincount(drawn, minlength=5)[1:]
    assert counts.sum() == 300
    deviation = np.sqrt(300 * 0.25 * 0.75)
    assert np.abs(counts - 75).max() < 4 * deviation


def test_a_limit_keeps_batches_with_so_many_classes_complete() -> None:
    shown = draw("keff", 1000, present=(1, 4), batch_size=20, limit=50).image
    assert len(shown) == 40


@pytest.mark.parametrize("ratio", [1, 10, 50])
def test_a_long_tail_falls_off_exponentially(ratio: int) -> None:
    images = draw("long-tail", 1000, imbalance=ratio).image
    counts = sorted(np.bincount(images % 10), reverse=True)

    # 100 images of the first class, 100 / ratio of the last of ten
    expected = [int(100 * ratio ** (-rank / 9) + 1e-9) for rank in range(10)]
    assert counts == expected
    assert len(np.unique(images)) == len(images)
    # classes are mixed
    assert runs(images % 10) > len(images) / 3


def test_the_seed_decides_which_class_of_a_long_tail_is_the_largest() -> None:
    largest = set()
    for seed in range(5):
        classes = draw("long-tail", 1000, seed=seed).image % 10
        largest.add(int(np.bincount(classes).argmax()))
    assert len(largest) > 1


def test_unknown_images_are_strewn_among_the_others() -> None:
    known = draw("separate", 60)
    unknown = LabelledSet("b", np.full(90, -2))
    positions = interleave(known, unknown, 1, np.random.default_rng(0))
    assert np.bincount(positions.domain).tolist() == [60, 60]

    known_shown = positions.image[positions.domain == 0]
    unknown_shown = positions.image[positions.domain == 1]
    assert known_shown.tolist() == known.image.tolist()
    assert len(np.unique(unknown_shown)) == 60
    assert 30 < runs(positions.domain) < 90


def test_a_dataset_that_comes_back_brings_new_images() -> None:
    nine = LabelledSet("a", np.arange(9))
    four = LabelledSet("b", np.arange(4))
    positions = SAMPLERS["recurring"].draw(
        [nine, four, nine],
        SamplerOptions(),
        np.random.default_rng(0),
    )
    # five of the nine images, the four, and the other four of the nine
    assert positions.domain.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    shown_of_nine = positions.image[positions.domain != 1]
    assert sorted(shown_of_nine) == list(range(9))


def test_a_long_stream_repeats_its_datasets_as_often_as_needed() -> None:
    positions = draw("long", 30, 10, length=100)
    assert np.bincount(positions.round).tolist() == [40, 40, 20]
    assert positions.domain[:40].tolist() == [0] * 30 + [1] * 10

    first_round = positions.image[:30]
    second_round = positions.image[40:70]
    assert sorted(second_round) == list(range(30))
    assert not np.array_equal(first_round, second_round)


DEFAULTS = {
    # the Dirichlet streams of StatA and MOON: 0.1, 0.01, 0.001; the mildest
    "gamma": 0.1,
    "present": (3, 3),  # docs/reproduce.md: `--present 3`
    "imbalance": 10.0,  # the long tails of L-TTA: 10, 20, 50; the mildest
    "length": 10_000,  # help of `cliquetta evaluate --length`
    "limit": None,
    "batch_size": 64,  # the SCAP paper, "for all experiments"
}


def test_defaults_of_the_options_are_the_documented_ones() -> None:
    assert asdict(SamplerOptions()) == DEFAULTS


def test_the_command_offers_the_same_defaults() -> None:
    parameters = signature(evaluate).parameters
    offered = {name: parameters[name].default for name in DEFAULTS}
    # on the command line the range is a text
    offered["present"] = parse_present(offered["present"])
    assert offered == DEFAULTS
