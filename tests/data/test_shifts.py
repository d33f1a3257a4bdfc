"""Shifts behind an id, the catalogue, and folders as data sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cliquetta.data.catalogue import get_dataset, list_datasets
from cliquetta.data.corruptions import corrupt_batch
from cliquetta.data.folder import find_images, folder_dataset
from cliquetta.data.shifts import Shift, ShiftedDataset, parse_dataset_id
from cliquetta.errors import UnknownNameError


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("bundled", ("bundled", None)),
        ("bundled@fog:3", ("bundled", Shift("fog", 3))),
        ("bundled@greyscale", ("bundled", Shift("greyscale", 5))),
        ("folder:/a@b/c", ("folder:/a@b/c", None)),
        ("folder:/a@b/c@snow:1", ("folder:/a@b/c", Shift("snow", 1))),
    ],
)
def test_ids_are_split(id: str, expected: tuple[str, Shift | None]) -> None:
    assert parse_dataset_id(id) == expected


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("bundled@fogg:3", "did you mean 'fog'"),
        ("bundled@fog:6", "1 to 5"),
        ("bundled@fog:x", "name:severity"),
        ("bundeld", "did you mean 'bundled'"),
    ],
)
def test_bad_ids_are_explained(id: str, message: str) -> None:
    with pytest.raises((UnknownNameError, ValueError), match=message):
        get_dataset(id)


def test_the_bundled_sets_are_what_the_catalogue_says() -> None:
    for entry in list_datasets():
        if not entry.needs_root:
            dataset = get_dataset(entry.id)
            assert len(dataset) == entry.expected["images"]
            assert len(dataset.names) == entry.classes
            assert dataset.labels is not None
            assert dataset.labels.bincount().tolist() == [len(dataset) // 10] * 10


def test_a_shifted_image_does_not_depend_on_its_company() -> None:
    dataset = get_dataset("bundled@gaussian_noise:4")
    assert isinstance(dataset, ShiftedDataset)
    assert dataset.id == "bundled@gaussian_noise:4"
    together = dataset.arrays([5, 1900, 7])
    assert together is not None
    assert np.array_equal(together[1], dataset.arrays([1900])[0])
    assert np.array_equal(together[1], np.asarray(dataset.load(1900)))
    clean = get_dataset("bundled").arrays([1900])
    assert np.array_equal(
        together[1], corrupt_batch(clean, "gaussian_noise", 4, 0, indices=[1900])[0]
    )
    assert not np.array_equal(together[1], clean[0])


def test_a_shift_changes_the_fingerprint_and_keeps_the_labels() -> None:
    clean, light, strong = (get_dataset(id) for id in ("bundled", "bundled@fog:1", "bundled@fog:2"))
    assert len({clean.fingerprint, light.fingerprint, strong.fingerprint}) == 3
    assert clean.labels.equal(strong.labels)
    assert clean.keys == strong.keys


def plant(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / name)
    return root


def test_sub_folders_are_classes_in_natural_order(tmp_path: Path) -> None:
    plant(tmp_path, "10/a.png", "2/b.PNG", "2/deep/c.jpg", ".cache/x.png", "2/.hidden.png")
    (tmp_path / "2" / "notes.txt").write_text("no image")
    dataset = get_dataset(f"folder:{tmp_path}")
    assert dataset.names == ("2", "10")
    assert dataset.keys == ("2/b.PNG", "2/deep/c.jpg", "10/a.png")
    assert dataset.labels.tolist() == [0, 0, 1]


def test_given_names_fix_the_order_of_labels(tmp_path: Path) -> None:
    plant(tmp_path, "Golden_Retriever/a.png", "cat/b.png")
    dataset = folder_dataset(tmp_path, names=["cat", "dog", "golden retriever"])
    assert dataset.labels.tolist() == [0, 2]
    assert folder_dataset(tmp_path).names == ("cat", "Golden Retriever")
    with pytest.raises(ValueError, match=r"'cat' of .* is not in the class list"):
        folder_dataset(tmp_path, names=["golden retriever"])


def test_a_flat_folder_needs_names(tmp_path: Path) -> None:
    plant(tmp_path, "b2.png", "b10.png")
    assert [path.name for path in find_images(tmp_path)] == ["b2.png", "b10.png"]
    with pytest.raises(ValueError, match="give class names"):
        folder_dataset(tmp_path)
    assert folder_dataset(tmp_path, names=["cat"]).labels is None


def test_folders_that_are_no_data_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no images"):
        folder_dataset(tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        get_dataset(f"folder:{tmp_path / 'missing'}")
    plant(tmp_path, "cat/a.png", "loose.png")
    with pytest.raises(ValueError, match=r"loose\.png"):
        folder_dataset(tmp_path)
