"""Changes between predictions, counted by hand, and their confusion."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cliquetta.report.changes import (
    changed_confusion,
    count_changes,
    in_words,
    moves,
    net_gain,
)
from tests._helpers.made_runs import ADAPTED, LABELS, PLAIN, predictions


def test_changes_are_counted_by_what_became_of_them() -> None:
    plain, adapted = pair = predictions(LABELS, PLAIN), predictions(LABELS, ADAPTED)
    changes = count_changes([pair])
    assert (changes.images, changes.changed) == (8, 4)
    assert (changes.test.repaired, changes.test.broken) == (1, 2)
    assert changes.gain == pytest.approx(-12.5)
    unknown = predictions([-1] * 8, PLAIN), predictions([-1] * 8, ADAPTED)
    both = count_changes([pair, unknown])
    assert (both.images, both.labelled, both.changed) == (16, 8, 8)
    assert both.gain == pytest.approx(-12.5)
    twice = count_changes([pair, pair])
    assert (twice.test.repaired, twice.test.broken, twice.gain) == (
        2,
        4,
        pytest.approx(-12.5),
    )  # type: ignore[comparison-overlap]
    assert twice.test.p == changes.test.p  # the same pictures again are no new evidence
    nothing = count_changes([unknown])
    assert (nothing.changed, nothing.test, nothing.gain) == (4, None, None)
    with pytest.raises(ValueError, match="same"):
        count_changes([(plain, predictions(LABELS[:4], PLAIN[:4]))])
    between = {
        (m.before, m.after): (m.repaired, m.broken) for m in moves(plain, adapted)
    }
    assert between == {(1, 0): (1, 0), (0, 2): (0, 0), (2, 3): (0, 1), (3, 2): (0, 1)}
    assert net_gain(plain, adapted).tolist() == [0, 1, 1, 1, 0, 0, 0, -1]


def test_confusion_is_that_of_all_images_folded_to_the_changed_classes() -> None:
    plain = predictions(LABELS, PLAIN)
    adapted = predictions(LABELS, [0, 0, 1, 0, 2, 3, 3, 3])
    confusion = changed_confusion(plain, adapted)
    assert confusion.classes == (0, 1)
    # label 0: one of two images moves from 1 to 0; labels 2 and 3 are the row "other"
    assert confusion.before.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 4]]
    assert confusion.difference.tolist() == [[1, -1, 0], [0, 0, 0], [0, 0, 0]]


@settings(deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40),
    st.integers(1, 4),
)
def test_confusion_counts_every_image(rows: Any, limit: Any) -> None:
    labels, before, after = (list(column) for column in zip(*rows, strict=True))
    confusion = changed_confusion(
        predictions(labels, before), predictions(labels, after), limit
    )
    assert confusion.before.sum() == confusion.after.sum() == len(rows)
    assert confusion.difference.sum(axis=1).tolist() == [0] * (
        len(confusion.classes) + 1
    )
    assert len(confusion.classes) <= limit


def test_words_say_what_became_of_all_changes() -> None:
    """Four of eight predictions change: one for the better, two for the worse, one neither."""
    pair = predictions(LABELS, PLAIN), predictions(LABELS, ADAPTED)
    assert in_words(count_changes([pair]), "TDA").startswith(
        "TDA changed 4 of 8 predictions: 1 from wrong to right, 2 from right to wrong, "
        "1 otherwise. That is a loss of 12.50 points"
    )
