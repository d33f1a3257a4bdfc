"""Datasets check themselves, and a hash distinguishes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cliquetta.data.dataset import ArrayDataset, FileDataset
from tests._helpers.trees import exif_of, random_pixels


def make(**changes: Any) -> ArrayDataset:
    settings = {
        "names": ("a", "b"),
        "keys": ("x", "y", "z"),
        "labels": [0, 1, 1],
        **changes,
    }
    images = settings.pop("images", random_pixels(3, 8, 8, 3))
    return ArrayDataset("made-up", images, **settings)


def test_images_come_back_as_they_are() -> None:
    dataset = make()
    assert np.array_equal(np.asarray(dataset.load(1)), dataset.images[1])
    assert np.array_equal(dataset.arrays([2, 0]), dataset.images[[2, 0]])
    assert make(names=("crane", "crane")).prompts.names == (
        "crane",
        "crane",
    )  # as in ImageNet


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": ("x", "x", "z")}, "must differ"),
        ({"keys": (), "labels": None}, "no images"),
        ({"labels": [0, 1]}, "shape"),
        ({"labels": [0, 1, 2]}, "holds 2"),
        ({"labels": [-3, 1, 1]}, "run from -3"),
        ({"keys": ("x", "y"), "labels": None}, "3 images for 2 keys"),
        ({"images": np.zeros((3, 8, 8, 3))}, "uint8"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_fingerprint_distinguishes_lists() -> None:
    changes = (
        {"keys": ("x", "y", "w")},
        {"labels": [0, 0, 1]},
        {"labels": None},
        {"names": "ac"},
    )
    prints = {
        make().fingerprint,
        *(make(**change).fingerprint for change in ({}, *changes)),
    }
    assert len(prints) == 5


def test_exif_orientation_is_the_datasets_choice(tmp_path: Path) -> None:
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=exif_of(6))
    sizes = [
        FileDataset("f", [tmp_path / "a.jpg"], names=("a",), labels=None, exif=exif)
        .load(0)
        .size
        for exif in (True, False)
    ]
    assert sizes == [(4, 6), (6, 4)]
