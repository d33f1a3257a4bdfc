"""Predictions of a run on disk, and the exact test between two runs."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cliquetta.evaluation.predictions import PREDICTIONS, Predictions, paired_test
from cliquetta.evaluation.record import STATE, Record
from tests._helpers.made_runs import predictions


def images(**classes: int) -> Predictions:
    """Predictions by image; label 0, of image d unknown."""
    labels = [-1 if key == "d" else 0 for key in classes]
    return replace(predictions(labels, list(classes.values())), keys=tuple(classes))


def test_predictions_are_paired_by_image_not_by_order() -> None:
    before = images(a=0, b=1, c=1, d=0)
    after = images(c=0, b=0, d=1, a=0)
    test = paired_test([(before, after)])
    assert test.images == 3
    assert test.repaired == 2
    assert test.broken == 0
    assert test.p == pytest.approx(0.5)  # two discordant pairs on one side


def test_an_image_of_several_runs_counts_once() -> None:
    before = images(a=0, b=1, c=1, d=0)
    after = images(c=0, b=0, d=1, a=0)
    twice = paired_test([(before, after), (before, before)])
    assert twice.images == 3
    assert twice.repaired == 2


def test_predictions_of_other_images_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="same"):
        paired_test([(images(a=0, b=1, c=1, d=0), images(a=0, b=1))])


def test_predictions_are_on_disk_before_the_state_that_counts_them(
    run: Callable[..., Record], disk_events: list[tuple[str, str]]
) -> None:
    run()
    names = [name for _, name in disk_events]
    counted = disk_events.index(("rename", STATE))
    assert ("flush", PREDICTIONS) in disk_events[:counted]
    assert names.index(PREDICTIONS) < names.index(f".{STATE}.tmp") < counted
