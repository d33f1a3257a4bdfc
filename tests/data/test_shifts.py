"""Shifts after an id, the catalogue, and folders as datasets."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cliquetta.data.catalogue import get_dataset, list_datasets
from cliquetta.data.corruptions import corrupt_batch
from cliquetta.data.files import find_images, folder_dataset, walk_images
from cliquetta.data.images import natural_key
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
        together[1],
        corrupt_batch(clean, "gaussian_noise", 4, 0, indices=[1900])[0],  # type: ignore[arg-type]
    )
    assert not np.array_equal(together[1], clean[0])


def test_a_shift_changes_the_fingerprint_and_keeps_the_labels() -> None:
    clean, light, strong = (get_dataset(id) for id in ("bundled", "bundled@fog:1", "bundled@fog:2"))
    assert len({clean.fingerprint, light.fingerprint, strong.fingerprint}) == 3
    assert clean.labels.equal(strong.labels)  # type: ignore[arg-type]
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
    names = ["cat", "dog", "golden retriever"]
    assert folder_dataset(tmp_path, names, labelled=True).labels.tolist() == [0, 2]
    assert folder_dataset(tmp_path).names == ("cat", "Golden Retriever")
    with pytest.raises(ValueError, match=r"'cat' is not in the class list"):
        folder_dataset(tmp_path, names[2:], labelled=True)


def test_sub_folders_are_labels_only_where_asked(tmp_path: Path) -> None:
    plant(tmp_path, "2024/june/a.png", "loose.png")
    dataset = folder_dataset(str(tmp_path), ["cat", "dog"])
    assert dataset.labels is None and dataset.keys == ("2024/june/a.png", "loose.png")
    assert "no labels" in repr(dataset)


def test_a_flat_folder_needs_names(tmp_path: Path) -> None:
    plant(tmp_path, "b2.png", "b10.png")
    assert [path.name for path in find_images(tmp_path)] == ["b2.png", "b10.png"]
    with pytest.raises(ValueError, match="give class names"):
        folder_dataset(tmp_path)
    assert folder_dataset(tmp_path, names=["cat"]).labels is None
    assert get_dataset(f"folder:{tmp_path}", classes=["a", "b"]).names == ("a", "b")
    (tmp_path / "classnames.txt").write_text("cat\n# horse\ndog\n")
    dataset = get_dataset(f"folder:{tmp_path}")
    assert dataset.names == ("cat", "dog") and dataset.labels is None


@given(
    st.sets(
        st.lists(st.sampled_from(["a", "b1", "b10", "b2", "b 2", "b-"]), max_size=2).map(
            lambda steps: "/".join([*steps, "x.png"])
        )
    )
)
@settings(max_examples=40, deadline=None)
def test_walking_sorts_like_whole_paths(names: set[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plant(Path(folder), *names)
        found = [path.relative_to(folder).as_posix() for path in walk_images(Path(folder))]
    assert sorted(found) == sorted(names)
    assert [natural_key(f) for f in found] == sorted(natural_key(name) for name in names)


def test_links_are_followed_once_and_the_rest_is_counted(tmp_path: Path) -> None:
    plant(tmp_path / "in", "a.png", "sub/b.png", ".hidden.png")
    plant(tmp_path / "out", "c.png")
    (tmp_path / "in/notes.txt").write_text("x")
    (tmp_path / "in/sub/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/linked").symlink_to(tmp_path / "out")
    (tmp_path / "in/gone.png").symlink_to(tmp_path / "nowhere.png")
    unused: Counter[str] = Counter()
    found = [path.relative_to(tmp_path / "in") for path in walk_images(tmp_path / "in", unused)]
    assert [path.as_posix() for path in found] == ["a.png", "linked/c.png", "sub/b.png"]
    assert unused == {"hidden": 1, ".txt": 1, ".png": 1, "folders reached twice by links": 1}


def test_folders_that_are_no_datasets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no images"):
        folder_dataset(tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        get_dataset(f"folder:{tmp_path / 'missing'}")
    plant(tmp_path, "cat/a.png", "loose.png")
    with pytest.raises(ValueError, match=r"loose\.png"):
        folder_dataset(tmp_path)
