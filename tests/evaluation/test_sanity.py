"""Warnings about numbers that look wrong."""

from __future__ import annotations

import pytest

from cliquetta.evaluation.metrics import near_chance


@pytest.mark.parametrize(
    ("accuracy", "classes"),
    [(0.005, 200), (0.001, 1000), (0.1, 10), (0.5, 2), (0.04, 101)],
)
def test_shuffled_labels_are_noticed(accuracy: float, classes: int) -> None:
    message = near_chance(accuracy, classes=classes, images=1000)
    assert message is not None and "near chance" in message and "data doctor" in message


@pytest.mark.parametrize(
    ("accuracy", "classes"),
    # published zero-shot accuracies of CLIP ViT-B/16 that are low, but real
    [(0.4201, 10), (0.2367, 100), (0.4427, 47), (0.4787, 200), (0.75, 2)],
)
def test_hard_data_are_not_taken_for_shuffled_ones(accuracy: float, classes: int) -> None:
    assert near_chance(accuracy, classes=classes, images=1000) is None


def test_a_handful_of_images_says_nothing() -> None:
    assert near_chance(0.0, classes=1000, images=29) is None
    assert near_chance(0.0, classes=1000, images=30) is not None
    assert near_chance(0.0, classes=1, images=1000) is None


def test_percent_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        near_chance(61.5, classes=10, images=100)
