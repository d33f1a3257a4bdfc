"""Few-shot examples: drawing, reading, checking and cropping them."""

import numpy as np
import pytest
import torch

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import ArrayDataset
from cliquetta.errors import UserError
from cliquetta.methods.building.support_set import FewShot
from cliquetta.model.preprocess import Preprocess
from tests._helpers.separable import FULL_IMAGE
from tests._helpers.tiny_world import TINY
from tests._helpers.tolerance import assert_near


def test_shots_are_drawn_per_class_and_by_seed() -> None:
    dataset = get_dataset("bundled-fewshot")
    preprocess = Preprocess(32)
    first = FewShot.from_dataset(dataset, 4, preprocess, 0)
    again = FewShot.from_dataset(dataset, 4, preprocess, 0)
    other = FewShot.from_dataset(dataset, 4, preprocess, 1)
    assert first.labels.bincount().tolist() == [4] * 10
    assert first.shots == 4
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    everything = FewShot.from_dataset(dataset, 16, preprocess)
    pictures = torch.from_numpy(np.array(dataset.arrays(range(160)))).permute(
        0, 3, 1, 2
    )
    assert torch.equal(everything.images, pictures)
    assert torch.equal(everything.labels, dataset.labels)  # type: ignore[arg-type]


def test_pictures_of_another_size_are_preprocessed_alike() -> None:
    dataset = get_dataset("bundled-fewshot")
    few = FewShot.from_dataset(dataset, 1, Preprocess(40))
    row = int((dataset.labels == few.labels[3]).nonzero()[0])
    candidates = [
        np.array(Preprocess(40).picture(dataset.load(i))) for i in range(row, row + 16)
    ]
    drawn = few.images[3].permute(1, 2, 0).numpy()
    assert any(np.array_equal(drawn, picture) for picture in candidates)


def test_too_many_shots_missing_labels_and_other_classes_are_refused() -> None:
    dataset = get_dataset("bundled-fewshot")
    preprocess = Preprocess(32)
    with pytest.raises(ValueError, match="17"):
        FewShot.from_dataset(dataset, 17, preprocess)
    blank = np.zeros((2, 32, 32, 3), np.uint8)
    unlabelled = ArrayDataset("mine", blank, names=("a",), keys=("1", "2"), labels=None)
    with pytest.raises(ValueError, match="labels"):
        FewShot.from_dataset(unlabelled, 1, preprocess)
    labelled = ArrayDataset("mine", blank, names=("a",), keys=("1", "2"), labels=[0, 0])
    with pytest.raises(ValueError, match="class list"):
        FewShot.from_dataset(dataset, 1, preprocess, validation=labelled)
    held = FewShot.from_dataset(dataset, 1, preprocess, validation=dataset).validation
    assert len(held or ()) == 160


def test_examples_of_another_form_are_refused() -> None:
    two = torch.zeros(2, 3, 8, 8)
    labels = torch.tensor([0, 1])
    wrong = torch.tensor([0, 1, 0]), torch.zeros(2), -labels
    images = torch.zeros(2, 3, 8, 9), two.int()
    pairs = (
        [(two, x) for x in wrong]
        + [(x, labels) for x in images]
        + [(two[:0], labels[:0])]
    )
    for pair in pairs:
        with pytest.raises(UserError):
            FewShot(*pair)


def test_crops_of_pictures_and_of_their_pixels_agree() -> None:
    pictures = FewShot.from_dataset(get_dataset("bundled-fewshot"), 1, TINY.preprocess)
    rows = np.arange(10)
    pixels = FewShot(pictures.pixels(rows, TINY), pictures.labels)
    a = pictures.crops(rows, TINY, np.random.default_rng(3), scale=(0.3, 1.0), count=3)
    b = pixels.crops(rows, TINY, np.random.default_rng(3), scale=(0.3, 1.0), count=3)
    assert a.shape == (10, 3, 3, 32, 32)
    assert_near(a, b, 0.03)  # 8-bit rounding
    assert not torch.equal(a[:, 0], a[:, 1])
    full = pictures.crops(rows, TINY, np.random.default_rng(3), scale=FULL_IMAGE)[:, 0]
    plain = pixels.images
    same = (full == plain).flatten(1).all(1) | (full == plain.flip(-1)).flatten(1).all(
        1
    )
    assert same.all()
