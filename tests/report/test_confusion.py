"""The confusion matrix of changed classes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cliquetta.report.confusion import changed_confusion
from tests._helpers.made_runs import LABELS, PLAIN, predictions


def test_confusion_is_that_of_all_answers_folded_to_the_changed_classes() -> None:
    plain, adapted = predictions(LABELS, PLAIN), predictions(LABELS, [0, 0, 1, 0, 2, 3, 3, 3])
    found = changed_confusion(plain, adapted)
    assert found.classes == (0, 1)
    # label 0: one of two answers moves from 1 to 0; labels 2 and 3 are the row "other"
    assert found.before.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 4]]
    assert found.difference.tolist() == [[1, -1, 0], [0, 0, 0], [0, 0, 0]]


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40), st.integers(1, 4))
def test_confusion_keeps_every_answer(rows: Any, limit: Any) -> None:
    labels, before, after = (list(column) for column in zip(*rows, strict=True))
    found = changed_confusion(predictions(labels, before), predictions(labels, after), limit)
    assert found.before.sum() == found.after.sum() == len(rows)
    assert found.difference.sum(axis=1).tolist() == [0] * (len(found.classes) + 1)
    assert len(found.classes) <= limit
