"""Stated labels as names of a class list, and lists that are sorted by class."""

from collections import Counter

import numpy as np
import pytest

from cliquetta.data.labels import (
    LabelReader,
    check_labels,
    comes_class_by_class,
    last_folder,
)
from cliquetta.errors import UserError

NAMES = ("cat", "polar bear", "frog")


def test_case_and_underscores_of_a_label_do_not_count() -> None:
    reader = LabelReader(NAMES, ["Polar_Bear", "dog"])
    assert reader.read("Polar_Bear ") == "polar bear"
    assert reader.read("dog") == ""


def test_numbers_count_classes_where_all_labels_are_numbers() -> None:
    reader = LabelReader(NAMES, ["0", "2", ""])
    assert reader.read("0") == "cat"
    assert reader.read("2") == "frog"
    assert reader.read("3") == ""
    assert reader.read("") == ""


def test_a_number_among_names_is_no_class() -> None:
    reader = LabelReader(NAMES, ["0", "cat"])
    assert reader.read("0") == ""
    assert reader.read("cat") == "cat"


def test_classes_that_are_called_by_numbers_are_no_indices() -> None:
    reader = LabelReader(["1", "0"], ["0", "1"])
    assert reader.read("0") == "0"


def test_the_deepest_folder_that_names_a_class_counts() -> None:
    reader = LabelReader(NAMES, [])
    assert reader.read_folder("cat/2026/frog/raw") == "frog"
    assert reader.read_folder("train/raw") == ""
    assert last_folder("s3://bucket/cat/1.jpg") == "cat"
    assert last_folder("1.jpg") == ""


def test_labels_of_which_none_is_a_class_are_refused() -> None:
    stated = Counter({"dog": 3})
    with pytest.raises(UserError, match=r"'dog'.*the classes are cat, polar bear"):
        check_labels(stated, Counter(), NAMES)


def test_labels_of_which_one_is_a_class_are_taken() -> None:
    stated = Counter({"dog": 3, "cat": 1})
    check_labels(stated, Counter({"cat": 1}), NAMES)


def test_sorted_lists_are_told_from_mixed_ones() -> None:
    sizes = [30, 50, 20]
    by_class = np.repeat([0, 1, 2], sizes)
    assert comes_class_by_class(by_class.tolist())
    shuffled = np.random.default_rng(0).permutation(by_class)
    assert not comes_class_by_class(shuffled.tolist())
    cameras = np.concatenate([by_class, by_class])  # two folders, each sorted
    assert comes_class_by_class(cameras.tolist())
    assert not comes_class_by_class([0] * 9)  # one class: nothing to give away
    assert not comes_class_by_class([0, 1, 2])
    assert not comes_class_by_class([])
