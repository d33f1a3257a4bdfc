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
    """Integer features, whose products are exact, and k different classes of every image."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randint(-1, 2, (b, width), generator=generator).double()
    top = torch.stack(
        [torch.randperm(classes, generator=generator)[:k] for _ in range(b)]
    )
    return features, top


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
    distinct = {members for _, members in expected}
    assert len(actual.sets) == len(distinct)
    assert {frozenset(row.nonzero()[:, 0].tolist()) for row in actual.sets} == distinct


@pytest.mark.parametrize("b", [61, 62, 63, 64, 124, 130])
@pytest.mark.parametrize("full_sets", [False, True])
def test_mining_agrees_beyond_one_word_of_bits(b: int, full_sets: bool) -> None:
    features, top = random_batch(b, b, 4, 2, 3)
    actual = mine_cliques(similar_images(features, 1.5), top, full_sets=full_sets)
    expected = mine(features, top.tolist(), 1.5, full_sets=full_sets)
    assert listed(actual) == expected
    assert len(expected) > 10


@pytest.mark.parametrize("odd", [0, 61, 62, 63, 69])
def test_sets_that_differ_in_one_image_stay_apart(odd: int) -> None:
    b = 70
    similar = torch.zeros(b, b, dtype=torch.bool)
    similar[5] = similar[6] = True
    similar[6, odd] = False
    actual = mine_cliques(similar, torch.zeros(b, 1, dtype=torch.long))
    assert len(actual) == len(actual.sets) == 2
    assert actual.sets.sum(dim=1).tolist() == [70, 69]
    assert not actual.sets[1, odd]


def test_a_similarity_equal_to_the_threshold_is_not_above_it() -> None:
    features = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.0, 1.0]])
    assert similar_images(features, 0.5).nonzero().tolist() == [[0, 0], [2, 2]]


def test_top_classes_are_best_first_and_ties_go_to_the_lower_class() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert top_classes(logits, 3).tolist() == [[1, 2, 3], [0, 1, 2]]
    assert top_classes(logits, 9).shape == (2, 4)
