"""The confusion matrix of changed classes."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cliquetta.report.confusion import changed_confusion
from tests._helpers.made_runs import LABELS, PLAIN, predictions


def test_confusion_is_that_of_all_images_folded_to_the_changed_classes() -> None:
    plain, adapted = predictions(LABELS, PLAIN), predictions(LABELS, [0, 0, 1, 0, 2, 3, 3, 3])
    confusion = changed_confusion(plain, adapted)
    assert confusion.classes == (0, 1)
    # label 0: one of two images moves from 1 to 0; labels 2 and 3 are the row "other"
    assert confusion.before.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 4]]
    assert confusion.difference.tolist() == [[1, -1, 0], [0, 0, 0], [0, 0, 0]]


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40), st.integers(1, 4))
def test_confusion_counts_every_image(rows: Any, limit: Any) -> None:
    labels, before, after = (list(column) for column in zip(*rows, strict=True))
    confusion = changed_confusion(predictions(labels, before), predictions(labels, after), limit)
    assert confusion.before.sum() == confusion.after.sum() == len(rows)
    assert confusion.difference.sum(axis=1).tolist() == [0] * (len(confusion.classes) + 1)
    assert len(confusion.classes) <= limit
