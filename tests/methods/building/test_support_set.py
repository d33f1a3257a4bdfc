"""Few-shot examples: drawing, reading, checking and cropping them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from cliquetta.data.catalogue import get_dataset
from cliquetta.data.dataset import ArrayDataset
from cliquetta.errors import UserError
from cliquetta.methods.building.support_set import FewShot
from cliquetta.model.preprocess import Preprocess
from tests._helpers.separable import FULL_IMAGE
from tests._helpers.tiny_world import TINY
from tests._helpers.tolerance import assert_near


def test_shots_are_drawn_per_class() -> None:
    dataset = get_dataset("bundled-fewshot")
    few = FewShot.from_dataset(dataset, 4, Preprocess(32))

    assert few.labels.bincount().tolist() == [4] * 10
    assert few.shots == 4


def test_shots_depend_on_the_seed_alone() -> None:
    dataset = get_dataset("bundled-fewshot")
    preprocess = Preprocess(32)
    first = FewShot.from_dataset(dataset, 4, preprocess, 0)
    again = FewShot.from_dataset(dataset, 4, preprocess, 0)
    other = FewShot.from_dataset(dataset, 4, preprocess, 1)

    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)


def test_all_shots_are_the_data_set_itself() -> None:
    dataset = get_dataset("bundled-fewshot")
    everything = FewShot.from_dataset(dataset, 16, Preprocess(32))
    arrays = np.array(dataset.arrays(range(160)))
    pictures = torch.from_numpy(arrays).permute(0, 3, 1, 2)

    assert torch.equal(everything.images, pictures)

    labels = dataset.labels
    assert labels is not None
    assert everything.labels.tolist() == list(labels)


def test_pictures_of_another_size_are_preprocessed_alike() -> None:
    dataset = get_dataset("bundled-fewshot")
    preprocess = Preprocess(40)
    few = FewShot.from_dataset(dataset, 1, preprocess)
    drawn = few.images[3].permute(1, 2, 0).numpy()

    # the 16 images of a class follow each other
    first = int((dataset.labels == few.labels[3]).nonzero()[0])
    found = False
    for index in range(first, first + 16):
        picture = preprocess.picture(dataset.load(index))
        found = found or np.array_equal(drawn, np.array(picture))

    assert found


def blank_dataset(labels: list[int] | None) -> ArrayDataset:
    """Two black images of one class."""
    return ArrayDataset(
        "mine",
        np.zeros((2, 32, 32, 3), np.uint8),
        names=("a",),
        keys=("1", "2"),
        labels=labels,
    )


def test_more_shots_than_a_class_has_are_refused() -> None:
    dataset = get_dataset("bundled-fewshot")
    with pytest.raises(ValueError, match="17"):
        FewShot.from_dataset(dataset, 17, Preprocess(32))


def test_images_without_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="labels"):
        FewShot.from_dataset(blank_dataset(None), 1, Preprocess(32))


def test_a_validation_split_of_other_classes_is_refused() -> None:
    dataset = get_dataset("bundled-fewshot")
    other = blank_dataset([0, 0])
    with pytest.raises(ValueError, match="class list"):
        FewShot.from_dataset(dataset, 1, Preprocess(32), validation=other)


def test_a_validation_split_is_read_completely() -> None:
    dataset = get_dataset("bundled-fewshot")
    few = FewShot.from_dataset(dataset, 1, Preprocess(32), validation=dataset)

    assert few.validation is not None
    assert len(few.validation) == 160


GOOD_IMAGES = torch.zeros(2, 3, 8, 8)


GOOD_LABELS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (GOOD_IMAGES, torch.tensor([0, 1, 0])),
        (GOOD_IMAGES, torch.zeros(2)),
        (GOOD_IMAGES, -GOOD_LABELS),
        (torch.zeros(2, 3, 8, 9), GOOD_LABELS),
        (GOOD_IMAGES.int(), GOOD_LABELS),
        (GOOD_IMAGES[:0], GOOD_LABELS[:0]),
    ],
    ids=[
        "more labels than images",
        "labels of floats",
        "negative labels",
        "images that are not square",
        "images of another type",
        "no images",
    ],
)
def test_examples_of_another_form_are_refused(images: Tensor, labels: Tensor) -> None:
    FewShot(GOOD_IMAGES, GOOD_LABELS)
    with pytest.raises(UserError):
        FewShot(images, labels)


def test_crops_of_pictures_and_of_their_pixels_agree() -> None:
    pictures = FewShot.from_dataset(get_dataset("bundled-fewshot"), 1, TINY.preprocess)
    rows = np.arange(10)
    pixels = FewShot(pictures.pixels(rows, TINY), pictures.labels)

    def crops(examples: FewShot) -> Tensor:
        generator = np.random.default_rng(3)
        return examples.crops(rows, TINY, generator, scale=(0.3, 1.0), count=3)

    of_pictures = crops(pictures)
    of_pixels = crops(pixels)

    assert of_pictures.shape == (10, 3, 3, 32, 32)
    assert_near(of_pictures, of_pixels, 0.03)  # 8-bit rounding
    assert not torch.equal(of_pictures[:, 0], of_pictures[:, 1])


def test_a_crop_of_the_full_image_is_the_image_or_its_mirror() -> None:
    dataset = get_dataset("bundled-fewshot")
    pictures = FewShot.from_dataset(dataset, 1, TINY.preprocess)
    rows = np.arange(10)
    generator = np.random.default_rng(3)
    crops = pictures.crops(rows, TINY, generator, scale=FULL_IMAGE)

    images = pictures.pixels(rows, TINY)
    for (crop,), image in zip(crops, images, strict=True):
        mirrored = image.flip(-1)
        is_image = torch.equal(crop, image)
        is_mirrored = torch.equal(crop, mirrored)
        assert is_image or is_mirrored
