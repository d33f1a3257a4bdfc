"""Mining against the oracle's loops, over random similarities and candidate classes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cliquetta.methods.scap.cliques import mine_cliques, similar_images, top_classes
from tests._helpers.oracle import listed
from tests.reference.scap_equations import mine


def random_batch(
    seed: int, b: int, classes: int, k: int, width: int
) -> tuple[Tensor, Tensor]:
    """Features of a batch and k different classes of every image."""
    generator = torch.Generator().manual_seed(seed)
    # integers, whose products are exact
    integers = torch.randint(-1, 2, (b, width), generator=generator)
    features = integers.double()

    top = []
    for _ in range(b):
        order = torch.randperm(classes, generator=generator)
        top.append(order[:k])
    return features, torch.stack(top)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    b=st.integers(1, 12),
    classes=st.integers(1, 5),
    k=st.integers(1, 3),
    width=st.integers(1, 5),
    threshold=st.sampled_from([-0.5, 0.5, 1.5, 2.5]),
    rules=st.fixed_dictionaries({"full_sets": st.booleans(), "repeats": st.booleans()}),
)
def test_mining_agrees_with_the_oracle(
    seed: int,
    b: int,
    classes: int,
    k: int,
    width: int,
    threshold: float,
    rules: dict[str, bool],
) -> None:
    features, top = random_batch(seed, b, classes, min(k, classes), width)
    similar = similar_images(features, threshold)
    actual = mine_cliques(similar, top, **rules)
    expected = mine(features, top.tolist(), threshold, **rules)

    assert listed(actual) == expected

    # every distinct set of members is kept once
    distinct = {members for _, members in expected}
    sets = [frozenset(row.nonzero()[:, 0].tolist()) for row in actual.sets]

    assert len(sets) == len(distinct)
    assert set(sets) == distinct


@pytest.mark.parametrize("b", [61, 62, 63, 64, 124, 130])
@pytest.mark.parametrize("full_sets", [False, True])
def test_mining_agrees_beyond_one_word_of_bits(b: int, full_sets: bool) -> None:
    features, top = random_batch(seed=b, b=b, classes=4, k=2, width=3)
    similar = similar_images(features, 1.5)
    actual = mine_cliques(similar, top, full_sets=full_sets)
    expected = mine(features, top.tolist(), 1.5, full_sets=full_sets)

    assert listed(actual) == expected
    assert len(expected) > 10


@pytest.mark.parametrize("odd", [0, 61, 62, 63, 69])
def test_sets_that_differ_in_one_image_stay_apart(odd: int) -> None:
    b = 70
    similar = torch.zeros(b, b, dtype=torch.bool)
    similar[5] = True
    similar[6] = True
    similar[6, odd] = False
    one_class = torch.zeros(b, 1, dtype=torch.long)
    actual = mine_cliques(similar, one_class)

    assert len(actual) == 2
    assert actual.sets.sum(dim=1).tolist() == [70, 69]
    assert not actual.sets[1, odd]


def test_a_similarity_equal_to_the_threshold_is_not_above_it() -> None:
    features = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.0, 1.0]])
    similar = similar_images(features, 0.5)
    assert similar.tolist() == [
        [True, False, False],
        [False, False, False],
        [False, False, True],
    ]


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([1.0, 3.0, 2.0, 0.0], [1, 2, 0]),
        ([1.0, 3.0, 3.0, 2.0], [1, 2, 3]),
        ([0.0, 0.0, 0.0, 0.0], [0, 1, 2]),
    ],
    ids=["no tie", "a tie", "all equal"],
)
def test_top_classes_are_best_first_and_ties_go_to_the_lower_class(
    logits: list[float], expected: list[int]
) -> None:
    assert top_classes(torch.tensor([logits]), 3).tolist() == [expected]


def test_no_more_classes_are_listed_than_there_are() -> None:
    assert top_classes(torch.zeros(2, 4), 9).shape == (2, 4)
